"""`lockstep ctl`: commands and their output, and requests to two ranks that serve meanwhile."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep import LockstepError, UsageError, ask
from lockstep.launch.cli.interruption import EXIT_INTERRUPTED
from lockstep.launch.ctl import stats_lines
from lockstep.launch.replay.report import read_report
from lockstep.ranks.group.control.port import ControlPort
from tests.kit.launch.in_process import Run, refusal
from tests.kit.launch.replays import COMMAND, Running, start


class Group:
    """Listens on a group's control socket, records requests, and sends the answers that a test sets."""

    def __init__(self, path: Path) -> None:
        self.socket = path
        self.requests: list[Any] = []
        self.answer: dict[str, object] | LockstepError = {}

    def answered(self, request: object) -> dict[str, object]:
        self.requests.append(request)
        if isinstance(self.answer, LockstepError):
            raise self.answer
        return self.answer


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "s")
    port = ControlPort(made.socket)
    port.serve(made.answered)
    yield made
    port.close()


Case = tuple[list[str], dict[str, object], dict[str, object], str]
"""For each case: the command line, the request, the answer, and the command's output."""

CASES: list[Case] = [
    (
        ["pin", "p", "--tokens", "1,2,3"],
        {"ask": "pin", "name": "p", "tokens": [1, 2, 3], "namespace": "", "ttl_s": 3600.0},
        {"tokens": 2},
        "pinned 2 of 3 tokens for 3600 s",
    ),
    (["unpin", "p"], {"ask": "unpin", "name": "p"}, {"was_pinned": True}, "unpinned"),
    (
        ["unpin", "p"],
        {"ask": "unpin", "name": "p"},
        {"was_pinned": False},
        "no such pin; it may have expired",
    ),
    (
        ["drop", "t"],
        {"ask": "drop", "namespace": "t"},
        {"pages": 8, "held": 0},
        "evicted 8 pages",
    ),
    (
        ["drop", "--all"],
        {"ask": "drop", "namespace": None},
        {"pages": 1, "held": 2},
        "evicted 1 page; 2 in use by requests: drop again when they have finished",
    ),
    (
        ["limit", "t", "--host-pages", "9", "--ttl", "60"],
        {"ask": "limit", "namespace": "t", "device_pages": None, "host_pages": 9, "ttl_s": 60.0},
        {"is_known": False},
        "set; namespace 't' has no cached pages yet",
    ),
    (
        ["limit", "t"],
        {"ask": "limit", "namespace": "t", "device_pages": None, "host_pages": None, "ttl_s": None},
        {"is_known": True},
        "removed",
    ),
    (["flush"], {"ask": "flush"}, {"operations": 7, "unwritten": {}}, "7 operations finished"),
    (
        ["flush"],
        {"ask": "flush"},
        {"operations": 7, "unwritten": {"store_failed": 3}},
        "7 operations finished; unwritten pages: store_failed 3",
    ),
    (["attach", "memory://"], {"ask": "attach", "store": "memory://"}, {}, "attached"),
    (["detach"], {"ask": "detach"}, {}, "detached"),
    (["weights", "7"], {"ask": "weights", "version": "7"}, {}, "weights '7'"),
    (
        ["log-level", "debug"],
        {"ask": "log-level", "level": "debug"},
        {},
        "log level set to debug",
    ),
]


STATS: dict[str, Any] = {
    "rank": 0,
    "world_size": 2,
    "steps": 1_234,
    "transport": "shm",
    "store": "attached",
    "ended_by": "",
    "replica": {
        "asked_tokens": 2_000,
        "hit_tokens": {"device": 500, "host": 250, "storage": 0},
        "operations": {"backup": {"complete": 3, "failed": 1}, "prefetch": {}},
        "missed_tokens": {"evicted": 1_150, "lost": 0, "never_seen": 100},
        "missed_pages": {"missing": 4, "late": 0},
    },
    "pools": {
        "kv": {
            "device": {"pages": 3_200, "free": 100, "cached": 3_000, "held": 9},
            "host": {"pages": 9, "free": 9, "cached": 0, "held": 0},
        }
    },
    "in_flight": {"prefetch": 1},
    "unwritten_pages": {},
    "left_unwritten_pages": {"store_failed": 2},
    "bytes_moved": {"l1_to_l2": 4_096, "l2_to_l1": 0},
    "pages_corrupt": 0,
    "storage_late": {"calls": 7, "waited_s": 1.5},
}


def test_statistics_are_told_in_lines_and_what_is_not_there_is_left_out() -> None:
    assert stats_lines(STATS) == [
        "rank 0 of 2: 1,234 steps, shm, store attached",
        "2,000 prompt tokens: device 25.0%, host 12.5%, storage 0.0%",
        "pool  tier    pages  cached  held  free",
        "kv    device  3,200   3,000     9   100",
        "kv    host        9       0     0     9",
        "in flight: prefetch 1",
        "operations: backup complete 3, backup failed 1",
        "tokens missed: evicted 1,150, never_seen 100",
        "pages missed: missing 4",
        "pages lost before they were written: store_failed 2",
        "bytes moved: l1_to_l2 4,096",
        "store calls that timed out: 7",
    ]


@pytest.mark.parametrize("case", CASES, ids=[" ".join(each[0]) for each in CASES])
def test_a_command_asks_for_one_thing_and_tells_what_became_of_it(
    lockstep: Run, group: Group, case: Case
) -> None:
    words, request, answer, output = case
    group.answer = answer
    command, *rest = words

    for_people = lockstep("ctl", command, group.socket, *rest)
    for_machines = lockstep("ctl", command, group.socket, *rest, "--json")

    assert for_people == (0, f"{output}\n", "")
    assert (for_machines[0], json.loads(for_machines[1])) == (0, answer)
    assert group.requests == [request, request]


def test_a_pin_that_keeps_nothing_is_not_done(lockstep: Run, group: Group) -> None:
    group.answer = {"tokens": 0}

    ended = lockstep("ctl", "pin", group.socket, "p", "--tokens", "[1, 2]", "--namespace", "t")

    assert ended == (
        3,
        "nothing is pinned: no token is cached, or the limit of pins is reached\n",
        "",
    )
    assert group.requests[0]["namespace"] == "t"


def test_the_list_is_a_table_with_the_largest_namespace_first(lockstep: Run, group: Group) -> None:
    group.answer = {
        "namespaces": {
            "": {"device_pages": 1, "host_pages": 2},
            "tenant\x1b": {"device_pages": 2000, "host_pages": 0},
        },
        "limits": [{"namespace": "*", "device_pages": None, "host_pages": 5, "ttl_s": 0.5}],
        "pins": {"p": {"namespace": "", "tokens": 64}},
        "store": "attached",
    }

    status, output, _ = lockstep("ctl", "list", group.socket)

    assert status == 0
    assert output.splitlines() == [
        "namespace     device pages  host pages",
        r"'tenant\x1b'         2,000           0",
        "''                       1           2",
        "limit of '*': 5 host pages, 0.5 s after the last use",
        "pin 'p': 64 tokens of ''",
        "store: attached",
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("nothing is cached for namespace 'x'"), 2),
        (LockstepError("the ranks have not agreed on the request yet"), 3),
    ],
)
def test_what_a_group_cannot_do_is_one_line_with_its_reason(
    lockstep: Run, group: Group, error: LockstepError, status: int
) -> None:
    group.answer = error

    assert lockstep("ctl", "drop", group.socket, "x") == (status, "", f"lockstep: {error}\n")


def test_a_group_of_another_version_is_named_as_such(lockstep: Run, group: Group) -> None:
    group.answer = {"operations": 7}

    error_line = refusal(lockstep, "ctl", "flush", group.socket)

    assert "the answer has no 'unwritten': the group runs another version" in error_line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["list", "{socket}.no"], "there is no socket at"),
        (["drop", "{socket}"], "name the namespace to drop, or give --all"),
        (["drop", "{socket}", "t", "--all"], "name the namespace to drop, or give --all"),
        (["log-level", "{socket}", "loud"], 'Choose from: "debug", "info", "warning", "error"'),
        (["unpin", "{socket}", "p", "b"], "unknown argument b (see `lockstep ctl unpin --help`)"),
        (["attach", "{socket}", "nowhere"], "STORE is 'nowhere', which is not a URI"),
        (["attach", "{socket}", "file://kv"], "STORE: store 'file://kv' names a host"),
        (["weights", "{socket}", ""], "VERSION is empty; give the name of the new weights"),
        (["pin", "{socket}", "p", "--tokens", "a,b"], "--tokens must be comma-separated token ids"),
    ],
)
def test_a_command_that_makes_no_sense_gets_one_line_and_status_2(
    lockstep: Run, group: Group, words: list[str], why: str
) -> None:
    error_line = refusal(lockstep, "ctl", *(each.format(socket=group.socket) for each in words))

    assert why in error_line
    assert group.requests == []


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Running]:
    """A long replay on two ranks, started and ready to accept control requests."""
    command = start(
        (tmp_path / "errors").open("w+", encoding="utf-8"),
        *(*COMMAND, "--ranks", 2, "--requests", 50_000, "--namespaces", 3),
        *("--control", tmp_path / "s", "--report", tmp_path / "report.json"),
    )
    command.wait_until((tmp_path / "s").is_socket)
    yield command
    command.kill()


@pytest.mark.distributed
def test_a_group_that_serves_does_all_it_is_asked_and_serves_what_is_right(
    lockstep: Run, serving: Running, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no store")
    refused = lockstep("ctl", "attach", tmp_path / "s", (tmp_path / "file").as_uri())[0]
    errors = [
        lockstep("ctl", command, tmp_path / "s", *rest)[2]
        for command, *rest in (
            ("list",),
            ("attach", (tmp_path / "kv").as_uri()),
            ("pin", "p", "--tokens", "1,2,3"),
            ("unpin", "p"),
            ("drop", "tenant-1"),
            ("limit", "tenant-2", "--device-pages", "50", "--host-pages", "100"),
            ("flush",),
            ("weights", "step 2"),
            ("log-level", "info"),
            ("drop", "--all"),
            ("detach",),
            ("stats",),
        )
    ]
    serving.process.send_signal(signal.SIGINT)
    ended = serving.process.wait(60)

    report = read_report(tmp_path / "report.json")
    assert [line for line in errors if line] == []
    assert (ended, report["pages_corrupt"]) == (EXIT_INTERRUPTED, 0)
    assert report["pages_verified"] > 0
    assert report["bytes"]["l2_to_l3"] > 0
    log = serving.output_so_far()
    assert log.count("request: drop namespace=None") == 2
    assert refused == 3
    # The default level includes the warning "withdrawn". Control requests are logged only after the
    # test has set the level to INFO.
    logged = re.findall(
        r"^[\d-]+ [\d:,]+ (\w+) lockstep\[\d+\]: .*(withdrawn|request: drop n)", log, re.MULTILINE
    )
    assert logged == [("WARNING", "withdrawn")] * 2 + [("INFO", "request: drop n")] * 2
    assert not (tmp_path / "s").exists()


@pytest.mark.distributed
def test_a_rank_that_is_killed_while_a_store_is_attached_leaves_nothing_behind(
    serving: Running, tmp_path: Path
) -> None:
    """One rank is killed while both open a store that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        silent.settimeout(60)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        uri = f"s3://bucket/kv?endpoint={endpoint}&region=r&anonymous=1"
        attaching = threads.submit(ask, tmp_path / "s", "attach", store=uri)
        connection, _ = silent.accept()
        serving.look()
        (other,) = (each for each in serving.seen.values() if each.environ().get("RANK") == "1")
        other.kill()
        with pytest.raises(LockstepError):
            attaching.result()
        ended = serving.process.wait(60)
        connection.close()

    assert ended != 0
    assert serving.survivors_after(10) == []
    assert not (tmp_path / "s").exists()
