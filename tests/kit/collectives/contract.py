"""The contract suite of collective transports: programs that ranks run, and checks of the results.

A transport's test module subclasses `CollectiveContract` and provides the fixture `ranks`, which runs a
program on every rank of a group in threads or processes.
"""

import time
from collections.abc import Callable, Collection
from functools import partial, reduce
from typing import Any, Protocol

import numpy as np
import pytest

from lockstep.coordinator.collective import Collective, Vector
from lockstep.errors import GroupError

LANES = 120
"""Number of int64 lanes in a test vector. A ballot with 32 prefetches has the same number of lanes."""

Hold = Callable[[], None]
"""Function that blocks the calling rank until every rank that does not call it has returned."""

Program = Callable[[Collective, Hold], Any]
"""Function that runs on one rank of the group and returns plain data."""

PATIENCE_S = 60.0
"""Timeout in seconds that no healthy rank reaches."""

PROMPT_S = 15.0
"""Longest time in seconds for an outcome that must not wait for a timeout, even on a busy machine."""

ROUNDS = 40
"""Number of rounds with random vectors in each test of the fold."""

SHORT_S = 0.5
"""Timeout in seconds that the test expects to expire."""


class Ranks(Protocol):
    """Runs each program on all ranks of a new group."""

    def run(self, program: Program, world_size: int, *, late: Collection[int] = ()) -> list[Any]:
        """Run the program on each rank of a new group; return the results in rank order.

        On ranks in `late`, the program's call of `hold` blocks until all other ranks have returned.
        While `hold` blocks, the group stays open.
        """
        ...


class CollectiveContract:
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_every_rank_gets_the_identical_minimum(self, ranks: Ranks, world_size: int) -> None:
        """Rule R1: every transport returns the same vector as the local fold."""
        seed = 20_000 + world_size
        assert ranks.run(partial(fold_random, seed), world_size) == [[]] * world_size

    def test_a_round_that_came_back_is_not_overwritten_by_a_later_one(self, ranks: Ranks) -> None:
        """Rule R7: a transport never reuses the memory of a vector that it has returned."""
        assert ranks.run(keep_rounds, 2) == [[[at, at] for at in range(4)]] * 2

    @pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 1, 7], [5000, 0, 3], [8, 8, 8]])
    def test_gather_returns_payloads_of_any_length_by_rank(
        self, ranks: Ranks, lengths: list[int]
    ) -> None:
        expected = [payload_of(rank, length) for rank, length in enumerate(lengths)]

        assert ranks.run(partial(gather_payloads, lengths), 3) == [expected] * 3

    def test_launches_count_rounds_and_not_gatherings(self, ranks: Ranks) -> None:
        """Rule R1: each transport counts its rounds, without gathers, so that tests can check them."""
        assert ranks.run(count_launches, 2) == [[0, 0, 1, 1, 2]] * 2

    @pytest.mark.parametrize("timeout_s", [SHORT_S, 0.0])
    @pytest.mark.parametrize("meeting", ["round", "gather"])
    def test_a_rank_that_does_not_come_is_a_timeout_within_the_deadline(
        self, ranks: Ranks, meeting: str, timeout_s: float
    ) -> None:
        """Rule R10: each wait has a deadline, at which it raises a documented error."""
        *others, _ = ranks.run(partial(stay_away, meeting, timeout_s), 3, late={2})

        errors, waited_s = zip(*others, strict=True)
        assert set(errors) == {"CollectiveTimeout"}
        assert timeout_s * 0.9 <= min(waited_s)
        assert max(waited_s) < timeout_s + PROMPT_S

    @pytest.mark.parametrize("meeting", ["round", "gather"])
    def test_when_a_rank_leaves_the_news_reaches_all_others_promptly(
        self, ranks: Ranks, meeting: str
    ) -> None:
        """Rule R10: a rank that notices that another has left raises the error before the timeout."""
        *others, last = ranks.run(partial(leave, meeting), 4)

        assert last is None
        errors, waited_s = zip(*others, strict=True)
        assert set(errors) == {"PeerLost"}
        assert max(waited_s) < PROMPT_S

    def test_a_rank_that_leaves_while_its_round_is_pending_is_not_held(self, ranks: Ranks) -> None:
        closed_s, _ = ranks.run(leave_while_pending, 2, late={1})

        assert closed_s < 2.0

    def test_close_may_be_called_twice_and_every_call_after_it_raises(self, ranks: Ranks) -> None:
        assert ranks.run(close_twice, 2) == [["PeerLost", "PeerLost"]] * 2

    def test_after_an_error_every_call_raises_it_at_once(self, ranks: Ranks) -> None:
        """Rule R13: a round that timed out ends the epoch; every later call raises the same error."""
        (first, *later), _ = ranks.run(go_on_after_an_error, 2, late={1})

        assert first[0] == "CollectiveTimeout"
        assert [error for error, _ in later] == ["CollectiveTimeout"] * 2
        assert max(waited_s for _, waited_s in later) < SHORT_S


def fold_random(seed: int, collective: Collective, hold: Hold) -> list[str]:
    """Fold random vectors; return a line for each round whose result is not the minimum over ranks."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for number in range(ROUNDS):
        vectors = [random_lanes(rng, LANES) for _ in range(collective.world_size)]
        folded = collective.launch(vectors[collective.rank].copy()).wait(PATIENCE_S)
        expected = reduce(np.minimum, vectors)
        if folded.dtype != np.int64 or not np.array_equal(folded, expected):
            wrong.append(f"round {number} came back as {folded!r}")
    return wrong


def random_lanes(rng: np.random.Generator, length: int) -> Vector:
    """Return random lanes of every magnitude, including the extremes of int64."""
    limits = np.iinfo(np.int64)
    lanes = rng.integers(limits.min, limits.max, size=length, dtype=np.int64, endpoint=True)
    lanes >>= rng.integers(0, 63, size=length)
    extremes = np.array([limits.min, limits.max, 0, -1, 1 << 62], dtype=np.int64)
    chosen = rng.random(length) < 0.3
    lanes[chosen] = rng.choice(extremes, size=int(chosen.sum()))
    return lanes


def keep_rounds(collective: Collective, hold: Hold) -> list[list[int]]:
    kept = [
        collective.launch(lanes_of(number + collective.rank)).wait(PATIENCE_S)
        for number in range(4)
    ]
    return [each[-2:].tolist() for each in kept]


def lanes_of(value: int) -> Vector:
    """Return a vector with the same value in every lane."""
    return np.full(LANES, value, dtype=np.int64)


def payload_of(rank: int, length: int) -> bytes:
    return bytes((rank * 31 + at) % 256 for at in range(length))


def gather_payloads(lengths: list[int], collective: Collective, hold: Hold) -> list[bytes]:
    rank = collective.rank
    return collective.gather(payload_of(rank, lengths[rank]), PATIENCE_S)


def count_launches(collective: Collective, hold: Hold) -> list[int]:
    counts = [collective.launches]
    collective.gather(b"x", PATIENCE_S)
    counts.append(collective.launches)
    meet(collective, "round", PATIENCE_S)
    counts.append(collective.launches)
    collective.gather(b"x", PATIENCE_S)
    counts.append(collective.launches)
    meet(collective, "round", PATIENCE_S)
    counts.append(collective.launches)
    return counts


def stay_away(
    meeting: str, timeout_s: float, collective: Collective, hold: Hold
) -> tuple[str, float] | None:
    meet(collective, "round", PATIENCE_S)
    if collective.rank == collective.world_size - 1:
        hold()
        return None
    return outcome_of(partial(meet, collective, meeting, timeout_s))


def leave(meeting: str, collective: Collective, hold: Hold) -> tuple[str, float] | None:
    meet(collective, "round", PATIENCE_S)
    if collective.rank == collective.world_size - 1:
        collective.close()
        return None
    outcome = outcome_of(partial(meet, collective, meeting, PATIENCE_S))
    collective.close()
    return outcome


def leave_while_pending(collective: Collective, hold: Hold) -> float:
    meet(collective, "round", PATIENCE_S)
    if collective.rank:
        hold()
        return 0.0
    collective.launch(lanes_of(0))
    started = time.monotonic()
    collective.close()
    return time.monotonic() - started


def close_twice(collective: Collective, hold: Hold) -> list[str]:
    meet(collective, "round", PATIENCE_S)
    collective.close()
    collective.close()
    return [
        outcome_of(partial(meet, collective, meeting, PATIENCE_S))[0]
        for meeting in ("round", "gather")
    ]


def go_on_after_an_error(collective: Collective, hold: Hold) -> list[tuple[str, float]]:
    meet(collective, "round", PATIENCE_S)
    if collective.rank:
        hold()
        return []
    return [
        outcome_of(partial(meet, collective, meeting, timeout_s))
        for meeting, timeout_s in (("round", SHORT_S), ("round", 4.0), ("gather", 4.0))
    ]


def meet(collective: Collective, meeting: str, timeout_s: float) -> None:
    if meeting == "round":
        collective.launch(lanes_of(collective.rank)).wait(timeout_s)
    else:
        collective.gather(b"here", timeout_s)


kept_errors: list[GroupError] = []
"""Errors that the tests keep, as a real caller may. The errors' tracebacks keep their frames' objects
alive."""


def outcome_of(call: Callable[[], None]) -> tuple[str, float]:
    """Return the name of the call's error, or "none", and the call's duration in seconds."""
    started = time.monotonic()
    try:
        call()
    except GroupError as error:
        kept_errors.append(error)
        return type(error).__name__, time.monotonic() - started
    return "none", time.monotonic() - started
