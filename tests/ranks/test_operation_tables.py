"""Only seven tables in a rank are keyed by operation."""

import ast
from collections.abc import Iterator

from tests.kit.source_tree import ROOT

FOLDERS = ("coordinator", "ranks", "telemetry")
OPERATIONS = {
    "coordinator/ballot.py _expected": "what this rank has seen of it",
    "ranks/executor/flights.py _flights": "its order, deadline and copy",
    "ranks/executor/storage_loop.py _running": "the tasks of lookups and transfers",
    "ranks/page_server/offers.py _operations": "the pages that are offered",
    "ranks/replica/operations/operation_table.py in_flight": "the operation itself",
    "ranks/replica/operations/requests.py copies": "the copies of a request that lends pages",
    "telemetry/tracer.py _operations": "its span, where somebody wants spans",
}
OTHERS = {
    "coordinator/collectives/in_process.py _gone": "ranks",
    "coordinator/collectives/in_process.py given": "ranks",
    "coordinator/collectives/shared_memory.py _rank_by_process": "processes",
    "ranks/executor/stores.py _staged": "digests of proposals",
    "ranks/group/control/stored_requests.py _sealed": "requests of an operator",
    "ranks/group/member/cache_stats.py lacking": "ranks",
    "ranks/group/member/request_log.py _kept": "requests of an operator",
    "ranks/page_server/reader.py _located": "a reader's requests",
    "ranks/protocol/orders.py on_host": "positions",
    "ranks/replica/operations/requests.py checkpoints": "positions",
    "ranks/replica/operations/requests.py ends": "positions",
    "ranks/replica/tree/eviction.py _line_of": "nodes",
    "ranks/replica/tree/node.py persisted": "components",
}


def tables() -> Iterator[str]:
    """Yield the names of attributes that are collections with integer keys or elements."""
    for path in sorted(each for folder in FOLDERS for each in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        fields = {node for each in classes for node in each.body}
        for node in filter(lambda each: isinstance(each, ast.AnnAssign), ast.walk(tree)):
            assert isinstance(node, ast.AnnAssign)
            kind, name = ast.unparse(node.annotation), ast.unparse(node.target)
            is_kept = name.startswith("self.") or node in fields
            if is_kept and kind.startswith(("dict[int,", "set[int]", "frozenset[int]")):
                yield f"{path.relative_to(ROOT)} {name.removeprefix('self.')}"


def test_seven_tables_have_operations_as_keys() -> None:
    assert set(tables()) == OPERATIONS.keys() | OTHERS.keys()
    assert len(OPERATIONS) == 7
