"""Findings of `lockstep top` for groups with a fault, and the alerts that fire for each."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from rich.console import Console

from lockstep.coordinator.ballot import Answered, Capped, Quiesced, QuiesceExpired
from lockstep.errors import DivergenceError, PeerLost
from lockstep.launch.top.findings import Weight, findings
from lockstep.launch.top.group_sample import GroupSample, Key, numbers_in
from lockstep.launch.top.screen import screen
from lockstep.launch.top.window import Window
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.config import Bounds
from lockstep.ranks.protocol.orders import LookUp
from tests.kit.ranks.in_turn import RanksInTurn, prompt
from tests.kit.ranks.pair import PAGE_TOKENS, Pair
from tests.kit.ranks.served_group import keyed
from tests.kit.servers.promtool import require_alerts
from tests.kit.source_tree import ROOT
from tests.kit.storage.calls import opened_at, run
from tests.kit.telemetry.watched_group import REQUESTS, SETTINGS, seen_of, watched_group

ALERTS = ROOT / "examples" / "watching" / "alerts.yml"
WINDOW_S = 10.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


Watch = Callable[[ExitStack, Path], Window]


def served(stack: ExitStack, *, requests: int = REQUESTS, **changes: Any) -> Window:
    group = stack.enter_context(watched_group(replace(SETTINGS, **changes)))
    before = group.seen()
    group.serve(requests=requests)
    return Window(group.seen(WINDOW_S), before)


def with_settings(**changes: Any) -> Watch:
    return lambda stack, _: served(stack, **changes)


async def lose_half(uri: str) -> None:
    async with opened_at(uri) as store:
        names = [stored.name async for stored in store.objects()]
        assert all(await store.remove(sorted(names, key=str)[::2], deadline=1e12))


def half_lost(stack: ExitStack, folder: Path) -> Window:
    store = f"file://{folder}/{{rank}}?durability=none"
    with watched_group(replace(SETTINGS, store=store)) as before:
        before.serve()
    run(lose_half(store.replace("{rank}", "1")))
    return served(stack, store=store)


def damaged(stack: ExitStack, folder: Path) -> Window:
    store = f"file://{folder}?durability=none"
    with watched_group(replace(SETTINGS, store=store)) as before:
        before.serve()
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > HEADER_BYTES:
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                last = opened.read(1)[0]
                opened.seek(-1, os.SEEK_END)
                opened.write(bytes([last ^ 1]))
    # Serve one request only: with more, one rank could remove corrupt pages before others read them.
    return served(stack, store=store, requests=1)


def unwritable(stack: ExitStack, folder: Path) -> Window:
    store = folder / "store"
    settings = replace(SETTINGS, store=f"file://{store}?durability=none")
    group = stack.enter_context(watched_group(settings))
    shutil.rmtree(store)
    store.touch()
    before = group.seen()
    group.serve(is_written=False)
    return Window(group.seen(WINDOW_S), before)


def idle(stack: ExitStack, _: Path) -> Window:
    group = stack.enter_context(watched_group(SETTINGS))
    return Window(group.seen(WINDOW_S), group.seen())


def detached(stack: ExitStack, _: Path) -> Window:
    group = stack.enter_context(watched_group(replace(SETTINGS, store="memory://detached")))
    before = group.seen()
    group.detach()
    return Window(group.seen(WINDOW_S), before)


def ended(stack: ExitStack, _: Path) -> Window:
    group = stack.enter_context(watched_group(SETTINGS))
    before, (first, other) = group.seen(), group.group.caches
    other.abandon()
    first.open_round()
    with pytest.raises(PeerLost):
        first.close_round()
    return Window(group.seen(WINDOW_S), before)


def killed(stack: ExitStack, folder: Path) -> Window:
    """Return samples of a group that no longer answers: after a rank was lost, all were killed."""
    ended_group = ended(stack, folder)
    assert ended_group.before is not None
    silent = {f"127.0.0.1:{9400 + rank}": "" for rank in ended_group.before.ranks}
    return Window(GroupSample(WINDOW_S, {}, silent), ended_group.before)


def diverged(stack: ExitStack, _: Path) -> Window:
    group = stack.enter_context(watched_group(SETTINGS))
    before = group.seen()

    def program(cache: Cache, _: object) -> None:
        cache.digest_facts("batch", cache.rank)
        cache.step()
        cache.step()

    for end in group.group.begin(program):
        assert isinstance(end.exception(120), DivergenceError)
    return Window(group.seen(WINDOW_S), before)


def unreadable(_: ExitStack, __: Path) -> Window:
    """Return samples of a group whose stores have pages that no rank can read."""
    ranks = RanksInTurn(2)
    before = seen_of(ranks.caches)
    ranks.every(lambda cache: cache.prefetch("fails", prompt(2)))
    operation = ranks.take_operation(LookUp)
    ranks.report(Answered(operation, 2))
    ranks.step()
    ranks.report(Capped(operation, 0), Quiesced(operation))
    ranks.step()
    ranks.step()
    return Window(seen_of(ranks.caches, WINDOW_S), before)


def hanging(heals: bool, *, is_too_much: bool = False, detaches: bool = False) -> Watch:
    """Return samples of a group in which one rank's store read hangs.

    With `heals`, the read ends later. With `is_too_much`, the quarantined pages exceed their bound,
    so the group drops its store. With `detaches`, an operator detaches the store.
    """

    def window(_: ExitStack, __: Path) -> Window:
        ranks = RanksInTurn(2, bounds=Bounds(quarantine_pages=0 if is_too_much else None))
        before = seen_of(ranks.caches)
        ranks.every(lambda cache: cache.prefetch("hangs", prompt(2)))
        operation = ranks.take_operation(LookUp)
        ranks.report(Answered(operation, 2))
        ranks.step()
        ranks.every(lambda cache: cache.abort("hangs"))
        ranks.executors[1].reports.append(QuiesceExpired(operation))
        ranks.step()
        ranks.step()
        assert ranks.phase(operation) == "QUARANTINED"
        if heals:
            ranks.report(Quiesced(operation))
            ranks.step()
            assert ranks.phase(operation) == "DONE"
        if detaches:
            assert not ranks.every(lambda cache: cache.detach_store().done())
            ranks.step()
        return Window(seen_of(ranks.caches, WINDOW_S), before)

    return window


CASES: dict[str, tuple[Watch, str, set[str]]] = {
    "room for all": (with_settings(), "no problem in the metrics", set()),
    "nobody asks": (idle, "no request was admitted", set()),
    "a store that has all": (with_settings(store="memory://all"), "no problem in the", set()),
    "one rank's store has lost half": (
        half_lost,
        "rank 1 lacks pages in the store that the other ranks have",
        {"LockstepRankLacksPages"},
    ),
    "a damaged store": (
        damaged,
        "pages in the store were corrupt",
        {"LockstepStoreCorrupt"},
    ),
    "a store that fails to read": (
        unreadable,
        "2 pages could not be read from the store",
        {"LockstepStoreUnreadable"},
    ),
    "a store that takes no write": (
        unwritable,
        "writes to the store failed; ",
        {"LockstepStoreNotWritten"},
    ),
    "a store that answers too late": (
        with_settings(store="fault+memory://slow?fault.delay=1&fault.delay_ms=800"),
        "the store is slow: ",
        {"LockstepStoreSlow"},
    ),
    "a store that was detached": (detached, "no request was admitted", set()),
    "a store that was lost": (
        hanging(heals=True, is_too_much=True),
        "the group has lost its store",
        {"LockstepStoreGone"},
    ),
    "a store that was lost and then detached": (
        hanging(heals=True, is_too_much=True, detaches=True),
        "no request was admitted",
        set(),
    ),
    "an operation that hangs": (
        hanging(heals=False),
        "1 operations hang; their pages are quarantined",
        {"LockstepOperationsQuarantined"},
    ),
    "an operation that hung": (hanging(heals=True), "no request was admitted", set()),
    "a small host": (
        with_settings(host_pages=40),
        "host memory is too small: all of its 40 pages are replaced every",
        {"LockstepHostMemoryTurnsOver"},
    ),
    "a tenant's quota": (with_settings(namespaces=2, quota_pages=20), "a tenant's quota", set()),
    "salts that never repeat": (
        with_settings(namespaces=0),
        "24 namespaces were new for 24 requests: salts are not reused",
        set(),
    ),
    "a group that has ended": (
        ended,
        "the group has ended; rank 0 reports: PeerLost",
        {"LockstepGroupEnded"},
    ),
    "an engine that was killed": (
        killed,
        "no rank answers at 127.0.0.1:9400, 127.0.0.1:9401",
        {"LockstepRankSilent"},
    ),
    "replicas that differ": (
        diverged,
        "the group has ended; rank 0 reports: DivergenceError",
        {"LockstepGroupEnded", "LockstepReplicasDiverged"},
    ),
}
"""For each fault: the function that samples the group, the first finding of `top`, and the exact set of
alerts that fire."""


def comparable(window: Window, alerts: set[str]) -> Window:
    """Return the samples without latencies, because any call may be slow on a busy machine.

    Latencies are kept if the case is about a slow store.
    """
    if "LockstepStoreSlow" in alerts:
        return window

    def rest(seen: GroupSample) -> GroupSample:
        ranks = {
            rank: {key: value for key, value in numbers.items() if "_seconds" not in key[0]}
            for rank, numbers in seen.ranks.items()
        }
        return replace(seen, ranks=ranks)

    assert window.before is not None
    return Window(rest(window.now), rest(window.before))


@pytest.mark.parametrize("case", CASES)
def test_what_is_the_matter_is_said_first_and_its_alert_alone_fires(
    case: str, stack: ExitStack, tmp_path: Path
) -> None:
    watch, what, alerts = CASES[case]

    window = comparable(watch(stack, tmp_path), alerts)

    assert what in findings(window)[0].what
    require_alerts(ALERTS, window, alerts, tmp_path)


def test_each_alert_fires_in_some_case() -> None:
    named = {
        line.split()[-1] for line in ALERTS.read_text("utf-8").splitlines() if "- alert:" in line
    }

    assert named == set.union(*(alerts for _, _, alerts in CASES.values()))


def sample_of(by_rank_0: str) -> GroupSample:
    return GroupSample(WINDOW_S, {0: numbers_in(dedent(by_rank_0))})


def test_reads_that_run_out_of_their_time_are_a_slow_store_and_no_damage(tmp_path: Path) -> None:
    metrics = """
    lockstep_missed_pages_total{rank="0",reason="unreadable"} 10
    lockstep_corrupt_pages_total{rank="0"} 0
    lockstep_storage_late_calls_total{rank="0"} 5
    """
    window = Window(sample_of(metrics), GroupSample(0.0, {0: {}}))
    found = [each.what for each in findings(window)]

    assert found[0] == ("the store is slow: 5 calls timed out; 10 pages were computed instead")
    assert [each for each in found if "corrupt" in each or "could not be read" in each] == []
    require_alerts(ALERTS, window, {"LockstepStoreSlow"}, tmp_path)


@pytest.mark.parametrize(
    ("state", "missed", "what", "remedy"),
    [
        ("attached", {}, "all tokens requested were cached", "no action needed"),
        (
            "attached",
            {"never_seen": 5, "lost": 1},
            "never seen 50%, lost in storage 10%",
            "page size",
        ),
        ("attached", {"evicted": 6}, "evicted 60%", "lockstep plan"),
        ("none", {"never_seen": 6}, "never seen 60%", "a store"),
    ],
)
def test_where_nothing_is_wrong_the_remedy_is_for_what_was_missed(
    state: str, missed: dict[str, int], what: str, remedy: str
) -> None:
    lines = [
        'lockstep_asked_tokens_total{rank="0"} 10',
        f'lockstep_store_state{{rank="0",state="{state}"}} 1',
        *(f'lockstep_missed_tokens_total{{rank="0",cause="{c}"}} {n}' for c, n in missed.items()),
    ]
    (found,) = findings(Window(sample_of("\n".join([*lines, ""]))))

    assert what in found.what
    assert remedy in found.remedy


def test_ranks_that_do_not_answer_are_named_with_what_was_last_heard_of_them() -> None:
    silent = {"a:1": "", "a:2": "", "a:3": "answered b'no'"}

    (first, *_) = findings(Window(GroupSample(40.0, {}, silent, {"a:2": 10.0})))

    assert first.weight is Weight.BROKEN
    assert first.what == "no rank answers at a:1, a:2 (last answer 30 s ago), a:3 (answered b'no')"


def test_of_many_ranks_that_do_not_answer_the_first_are_named() -> None:
    silent = {f"a:{port}": "" for port in range(1, 4096)}

    (first, *_) = findings(Window(GroupSample(0.0, {}, silent)))

    assert first.what == "no rank answers at a:1, a:2, a:3, a:4 and 4,091 others"


def test_what_a_rank_has_counted_before_it_was_first_heard_is_no_growth() -> None:
    def numbers(rank: int, waited: float) -> dict[Key, float]:
        labels = f'{{rank="{rank}"}}'
        return numbers_in(
            f"lockstep_rounds_total{labels} {100 + waited}\n"
            f"lockstep_round_wait_seconds_total{labels} {waited}\n"
        )

    before = GroupSample(0.0, {1: numbers(1, 5.0)})
    window = Window(GroupSample(WINDOW_S, {rank: numbers(rank, 9.0) for rank in (0, 1)}), before)

    assert window.grew_on_every_rank("round_wait_seconds_total") == 4.0
    assert window.waits() == {1: 4.0}
    assert window.grew("rounds_total") == 4.0


def shown(*windows: Window) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(screen(windows))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_what_went_wrong_before_the_last_seconds_is_said_with_when() -> None:
    """`top --once` also shows a fault that happened before both samples, and says when it happened."""
    ranks = {
        rank: numbers_in(f'lockstep_corrupt_pages_total{{rank="{rank}"}} {rank + 3}\n')
        for rank in range(2)
    }

    lines = shown(
        Window(GroupSample(WINDOW_S + 2, ranks), GroupSample(WINDOW_S, ranks)),
        Window(GroupSample(WINDOW_S + 2, ranks)),
    )

    assert "why since opened: pages in the store were corrupt: rank 0 3, rank 1 4" in lines
    assert not any("no action needed" in line for line in lines)


def test_evictions_of_unknown_pace_do_not_make_host_memory_small(stack: ExitStack) -> None:
    now = served(stack, host_pages=40).now

    assert not any("host memory" in each.what for each in findings(Window(now)))


def test_pages_of_another_group_are_not_said_to_come_from_a_store(stack: ExitStack) -> None:
    pair, tokens = Pair(stack, "llama", (2, 2)), keyed(1, 8 * PAGE_TOKENS + 7, PAGE_TOKENS)
    pair.compute(tokens, 8 * PAGE_TOKENS)
    before = seen_of(pair.decode.caches)
    cached = pair.goes_on(tokens)

    window = Window(seen_of(pair.decode.caches, WINDOW_S), before)
    lines = shown(window)

    assert cached == window.grew("hit_tokens_total", tier="peer") > 0
    assert window.grew("hit_tokens_total", tier="storage") == 0
    assert [line.split(";")[0] for line in lines if line.startswith("store ")] == ["store none"]
    assert any(line.startswith("hit, peer") for line in lines)


@pytest.mark.parametrize(
    ("state", "where"), [("none", "peers"), ("attached", "the store or peers")]
)
def test_what_peers_may_be_to_blame_for_is_not_said_of_a_store(state: str, where: str) -> None:
    metrics = f"""
    lockstep_store_state{{rank="0",state="{state}"}} 1
    lockstep_storage_calls_in_flight{{rank="0",store="peer",call="read"}} 0
    lockstep_corrupt_pages_total{{rank="0"}} 5
    """
    assert (
        findings(Window(sample_of(metrics)))[0].what == f"pages in {where} were corrupt: rank 0 5"
    )
