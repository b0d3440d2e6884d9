"""A process forked from a rank inherits all its files, but does not belong to the group."""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives.torch_gloo import TorchCollective
from lockstep.errors import LockstepError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.opening import connected
from lockstep.ranks.protocol.config import CacheConfig
from tests.kit.collectives.contract import PATIENCE_S, PROMPT_S, Hold, lanes_of
from tests.kit.ranks.as_processes import BUILDS, RanksAsProcesses

pytestmark = pytest.mark.distributed

REFUSED = "UsageError: this process was forked from process PARENT, and only that process is in the"
"""Start of the error text that a forked child gets from every call that needs the group."""


@pytest.mark.parametrize("transport", BUILDS)
def test_a_forked_child_has_no_part_in_rounds_and_its_close_ends_nothing(
    transport: str, tmp_path: Path
) -> None:
    """Rule R10: a forked child runs its parent's `finally` blocks, and this must not end the epoch."""
    ranks = RanksAsProcesses(tmp_path, build=BUILDS[transport])

    results = ranks.run(fork_in_a_round, 4)

    assert [beginnings(outcomes) for outcomes, _ in results] == [
        [REFUSED] * 3 + ["went well"] * 2
    ] * 4
    assert [rounds for _, rounds in results] == [[1, 2, 3]] * 4


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_a_forked_child_that_closes_the_cache_does_nothing_to_its_parent(
    transport: str, tmp_path: Path
) -> None:
    """The parent's rounds, copies and storage writes continue after the child closes its cache."""
    results = RanksAsProcesses(tmp_path).run(
        partial(fork_with_a_cache, transport, tmp_path / "kv"), 2
    )

    expected = [REFUSED] * 5 + ["went well"] * 3
    assert [(beginnings(outcomes), *rest) for outcomes, *rest in results] == [
        (expected, True, True, {"complete": 1})
    ] * 2


def fork_in_a_round(collective: Collective, hold: Hold) -> tuple[list[str], list[int]]:
    pending = collective.launch(lanes_of(1 + collective.rank))
    outcomes = outcomes_in_a_child(
        lambda: pending.wait(PATIENCE_S),
        lambda: collective.launch(lanes_of(0)),
        lambda: collective.gather(b"", PATIENCE_S),
        collective.close,
        collective.close,
    )
    rounds = [int(pending.wait(PATIENCE_S)[0])]
    for number in (2, 3):
        lanes = lanes_of(number + collective.rank)
        rounds.append(int(collective.launch(lanes).wait(PATIENCE_S)[0]))
    collective.gather(b"", PATIENCE_S)
    collective.close()
    return outcomes, rounds


def fork_with_a_cache(
    transport: str, store: Path, group: TorchCollective, hold: Hold
) -> tuple[list[str], bool, bool, dict[str, int]]:
    config = CacheConfig(
        model="m",
        layout=PageLayout(
            page_tokens=4, columns=(Column(name="k", layers=1, heads=2, elements=1),)
        ),
        device_pages=8,
        host_pages=8,
        store=f"file://{store}?durability=none",
        transport=transport,  # type: ignore[arg-type]
    )
    cache = Cache.open(config, connected(config, group))
    tokens = list(range(8))
    cache.load_back("a", b"", reserve_tokens=8)
    cache.insert("a", tokens)
    cache.step()
    in_flight = not cache.inspection.idle
    outcomes = outcomes_in_a_child(
        cache.step,
        cache.step,
        lambda: cache.prefetch("b", tokens),
        lambda: cache.attach_store("memory://"),
        cache.flush,
        lambda: cache.release("a"),
        cache.abandon,
        cache.close,
    )
    cache.release("a")
    flushed = bool(cache.flush())
    persisted = cache.stats().operations["persist"]
    cache.close()
    return outcomes, in_flight, flushed, persisted


def outcomes_in_a_child(*calls: Callable[[], object]) -> list[str]:
    """Fork; return the outcome of each call in the child, or one line if the child hung."""
    ours, theirs = os.pipe()
    parent = str(os.getpid())
    child = os.fork()
    if not child:
        try:
            os.write(theirs, json.dumps([outcome(call, parent) for call in calls]).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    readable, _, _ = select.select([ours], [], [], PROMPT_S)
    if not readable:
        os.kill(child, signal.SIGKILL)
    encoded = os.read(ours, 1 << 16) if readable else b'["the child hung"]'
    os.close(ours)
    os.waitpid(child, 0)
    outcomes: list[str] = json.loads(encoded)
    return outcomes


def beginnings(outcomes: list[str]) -> list[str]:
    """Return the start of each outcome, as long as the expected error text."""
    return [each[: len(REFUSED)] for each in outcomes]


def outcome(call: Callable[[], object], parent: str) -> str:
    started = time.monotonic()
    try:
        call()
    except LockstepError as error:
        return f"{type(error).__name__}: {error}".replace(parent, "PARENT")
    took_s = time.monotonic() - started
    return "went well" if took_s < 1 else f"took {took_s:.1f} s"
