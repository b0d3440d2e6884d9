"""A ballot updates its lanes incrementally; compare them with lanes computed from scratch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from lockstep.coordinator.ballot import (
    Answered,
    Ballot,
    Capped,
    Expired,
    Landed,
    OperationProgress,
    Progress,
    Quiesced,
    QuiesceExpired,
    TransferEnded,
)
from lockstep.coordinator.collective import Vector
from lockstep.coordinator.lanes import (
    HEADER_LANES,
    NEUTRAL,
    NO_ANSWER,
    SLOT_LANES,
    BallotShape,
    LaneLayout,
    Voter,
)
from lockstep.coordinator.operation import Phase, Queue
from lockstep.coordinator.prefetch_slots import UNBOUNDED, PrefetchSlot, PrefetchSlots
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.simulation.schedule import run_schedule

SHAPE = BallotShape(world_size=3, prefetch_slots=4)
RANK = 1
LAYOUT = LaneLayout(
    epoch=1, round=1, state_digest=0, prefetch_slots=PrefetchSlots(SHAPE.prefetch_slots).freeze()
)
OPERATIONS = st.integers(1, 8)
PAGES = st.integers(0, 9)

ACTIONS = ("free_slot", "enqueue", "enqueue", "settle", "forget")

REPORTS: st.SearchStrategy[Progress] = st.one_of(
    st.builds(Answered, OPERATIONS, PAGES),
    st.builds(Answered, OPERATIONS, PAGES, st.just((11, 14))),
    st.builds(Landed, OPERATIONS, PAGES),
    st.builds(Capped, OPERATIONS, PAGES),
    st.builds(Expired, OPERATIONS),
    st.builds(TransferEnded, OPERATIONS, st.booleans()),
    st.builds(Quiesced, OPERATIONS),
    st.builds(QuiesceExpired, OPERATIONS),
)


def slot_lanes(
    prefetch_slot: PrefetchSlot, seen: OperationProgress, world_size: int, rank: int
) -> list[int]:
    """Return the expected lanes of a prefetch slot, computed from the progress seen."""
    deadline = -(rank + 1) if seen.expired else 0
    if prefetch_slot.phase is Phase.TRANSFER:
        ceiling = NEUTRAL if seen.ceiling == UNBOUNDED else seen.ceiling * world_size + rank
        return [seen.landed, ceiling, deadline]
    if seen.answered is None:
        return [NO_ANSWER, NEUTRAL, deadline]
    longest = seen.answered.longest(prefetch_slot.bound)
    return [longest * world_size + rank, -longest, deadline]


def queue_lanes(
    queue: Queue,
    line: list[tuple[int, int]],
    through: int,
    seen: Callable[[int], OperationProgress | None],
    named: Callable[[int], int],
) -> list[int]:
    """Return the expected lanes of a queue, computed from its unsettled operations (`line`).

    `through` is the queue index of the last settled operation. `named` encodes a failed operation's
    queue index with this rank's number. An operation that the ballot no longer expects counts as ended,
    because all ranks have ended it.
    """
    outcomes = [(queue_index, outcome(queue, seen(operation))) for queue_index, operation in line]
    for queue_index, ended in outcomes:
        if ended is not True:
            break
        through = queue_index
    failed = [queue_index for queue_index, ended in outcomes if ended is False]
    return [through, named(min(failed)) if failed else NEUTRAL]


def outcome(queue: Queue, seen: OperationProgress | None) -> bool | None:
    """Return whether an operation succeeded in its queue, or None while it is in flight."""
    if seen is None:
        return True
    if queue is Queue.QUARANTINE:
        return True if seen.quiesced else None
    if queue is Queue.QUIESCE:
        return True if seen.quiesced else False if seen.quiesce_expired else None
    return seen.ended


@dataclass
class Kept:
    """A ballot that changes step by step, and a plain record of all its changes."""

    ballot: Ballot = field(default_factory=lambda: Ballot(SHAPE, RANK))
    prefetch_slots: dict[int, PrefetchSlot] = field(default_factory=dict[int, PrefetchSlot])
    lines: dict[Queue, list[tuple[int, int]]] = field(
        default_factory=lambda: {queue: [] for queue in Queue}
    )
    settled: dict[Queue, int] = field(default_factory=lambda: dict.fromkeys(Queue, 0))
    queue_index: int = 0
    expected: dict[int, list[Progress]] = field(default_factory=dict[int, list[Progress]])
    """Maps each expected operation to the progress reported for it."""
    names: dict[int, int] = field(default_factory=dict[int, int])
    """Maps a test's operation numbers to current ids: a forgotten operation gets a new id."""

    def operation(self, number: int) -> int:
        return self.names.get(number, number)

    def vote(self) -> list[int]:
        """Return all lanes except the header, as the ballot fills them."""
        vector = self.ballot.fill(LAYOUT, Voter(healthy=True, time_ms=0))
        return [int(lane) for lane in vector[HEADER_LANES:]]

    def body(self) -> list[int]:
        """Return all lanes except the header, computed from scratch."""
        lanes: list[int] = []
        for queue in Queue:
            line, through = self.lines[queue], self.settled[queue]
            lanes += queue_lanes(queue, line, through, self.seen, self.named)
        for number in range(SHAPE.prefetch_slots):
            prefetch_slot = self.prefetch_slots.get(number)
            lanes += (
                [NEUTRAL] * SLOT_LANES
                if prefetch_slot is None
                else slot_lanes(
                    prefetch_slot,
                    self.seen(prefetch_slot.operation) or OperationProgress(),
                    SHAPE.world_size,
                    RANK,
                )
            )
        return lanes

    def seen(self, operation: int) -> OperationProgress | None:
        """Return the progress that follows from all reports, or None for a forgotten operation."""
        reports = self.expected.get(operation)
        if reports is None:
            return None
        answers = [each for each in reports if isinstance(each, Answered)]
        ends = [each.ok for each in reports if isinstance(each, TransferEnded)]
        return OperationProgress(
            answered=answers[0] if answers else None,
            landed=max((each.pages for each in reports if isinstance(each, Landed)), default=0),
            ceiling=min(
                (each.pages for each in reports if isinstance(each, Capped)), default=UNBOUNDED
            ),
            expired=any(isinstance(each, Expired) for each in reports),
            ended=ends[0] if ends else None,
            quiesced=any(isinstance(each, Quiesced) for each in reports),
            quiesce_expired=any(isinstance(each, QuiesceExpired) for each in reports),
        )

    def named(self, value: int) -> int:
        return value * SHAPE.world_size + RANK

    def note(self, progress: Progress) -> None:
        progress = structs.replace(progress, operation=self.operation(progress.operation))
        self.ballot.note(progress)
        if progress.operation in self.expected:
            self.expected[progress.operation].append(progress)

    def assign_slot(self, operation: int, phase: Phase, bound: int) -> None:
        """Put an operation into a free prefetch slot, or update the slot that it already has."""
        theirs = [at for at, each in self.prefetch_slots.items() if each.operation == operation]
        free = [at for at in range(SHAPE.prefetch_slots) if at not in self.prefetch_slots]
        for at in (theirs or free)[:1]:
            self.ballot.assign_slot(operation, at, phase, bound)
            self.prefetch_slots[at] = PrefetchSlot(operation, phase, bound)
            self.expected.setdefault(operation, [])

    def free_slot(self, operation: int) -> None:
        self.ballot.free_slot(operation)
        self.prefetch_slots = {
            at: each for at, each in self.prefetch_slots.items() if each.operation != operation
        }

    def enqueue(self, operation: int, queue: Queue) -> None:
        if any(operation == each for line in self.lines.values() for _, each in line):
            return
        self.queue_index += 1
        self.ballot.enqueue(queue, self.queue_index, operation)
        self.lines[queue].append((self.queue_index, operation))
        self.expected.setdefault(operation, [])

    def settle(self, queue: Queue) -> None:
        """Settle the first operation of a queue, even if this rank has not reported its end."""
        if self.lines[queue]:
            self.settled[queue], _ = self.lines[queue].pop(0)
            self.ballot.dequeue(queue, self.settled[queue])

    def forget(self, number: int) -> None:
        operation = self.operation(number)
        self.names[number] = operation + 100
        self.ballot.forget(operation)
        self.expected.pop(operation, None)
        self.prefetch_slots = {
            at: each for at, each in self.prefetch_slots.items() if each.operation != operation
        }


@given(data=st.data())
@settings(max_examples=300)
def test_the_lanes_equal_those_computed_from_all_that_was_noted(data: st.DataObject) -> None:
    """Rule R13: after any commands and reports, a ballot's lanes equal lanes computed from scratch."""
    votes = votes_of_a_walk(data)

    assert [vote for vote, _ in votes] == [obvious for _, obvious in votes]


def votes_of_a_walk(data: st.DataObject) -> list[tuple[list[int], list[int]]]:
    """Apply drawn commands and reports; return each vote with the expected vote."""
    kept = Kept()
    votes: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["note"] * 4 + ["prefetch_slot"] * 2 + [*ACTIONS, "vote"])):
            case "note":
                kept.note(data.draw(REPORTS))
            case "prefetch_slot":
                phase = data.draw(st.sampled_from([Phase.QUERY, Phase.RESTORABLE, Phase.TRANSFER]))
                kept.assign_slot(
                    kept.operation(data.draw(OPERATIONS)),
                    phase,
                    data.draw(PAGES | st.just(UNBOUNDED)),
                )
            case "free_slot":
                kept.free_slot(kept.operation(data.draw(OPERATIONS)))
            case "enqueue":
                kept.enqueue(
                    kept.operation(data.draw(OPERATIONS)), data.draw(st.sampled_from(Queue))
                )
            case "settle":
                kept.settle(data.draw(st.sampled_from(Queue)))
            case "forget":
                kept.forget(data.draw(OPERATIONS))
            case _:
                votes.append((kept.vote(), kept.body()))
    return [*votes, (kept.vote(), kept.body())]


@pytest.mark.parametrize("queue", Queue)
@pytest.mark.parametrize("seed", range(8))
def test_the_first_failed_of_a_long_queue_is_the_one_that_a_scan_finds(
    queue: Queue, seed: int
) -> None:
    """The first-failed lane equals the result of a scan, even if I/O ends after its deadline."""
    votes = votes_of_a_long_queue(queue, random.Random(seed))

    assert [vote for vote, _ in votes] == [obvious for _, obvious in votes], f"seed {seed}"


def votes_of_a_long_queue(queue: Queue, draw: random.Random) -> list[tuple[list[int], list[int]]]:
    """Let operations of a long queue fail and finish at random; return votes with expected votes."""
    kept = Kept()
    votes: list[tuple[list[int], list[int]]] = []
    for operation in range(1, 400):
        kept.enqueue(operation, queue)
        for _ in range(draw.randrange(3)):
            other = draw.randrange(max(1, operation - 60), operation + 1)
            kept.note(
                draw.choice((TransferEnded(other, ok=draw.random() < 0.8), QuiesceExpired(other)))
                if draw.random() < 0.6
                else Quiesced(other)
            )
        if draw.random() < 0.3:
            kept.settle(queue)
        if draw.random() < 0.2:
            votes.append((kept.vote(), kept.body()))
    return [*votes, (kept.vote(), kept.body())]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare each launched vector with lanes computed from scratch; record how many slots are used."""
    open_round = RankCache.open_round
    taken: list[int] = []

    def open_and_compare(self: RankCache) -> None:
        given: list[Vector] = []
        fill = Ballot.fill

        def watched(ballot: Ballot, layout: LaneLayout, voter: Voter) -> Vector:
            given.append(fill(ballot, layout, voter))
            return given[0]

        with monkeypatch.context() as patched:
            patched.setattr(Ballot, "fill", watched)
            open_round(self)
        prefetch_slots = self.inspection.prefetch_slots.taken()
        taken.append(len(prefetch_slots))
        at = self.inspection.lanes - SLOT_LANES * self._rounds.shape.prefetch_slots  # pyright: ignore[reportPrivateUsage]
        lanes = given[0][at:].reshape(-1, SLOT_LANES).tolist()
        for number, actual in enumerate(lanes):
            prefetch_slot = prefetch_slots.get(number)
            assert actual == (
                [NEUTRAL] * SLOT_LANES
                if prefetch_slot is None
                else slot_lanes(
                    prefetch_slot,
                    self._ballot.progress_of(prefetch_slot.operation),  # pyright: ignore[reportPrivateUsage]
                    self.world_size,
                    self.rank,
                )
            )

    monkeypatch.setattr(RankCache, "open_round", open_and_compare)
    return taken


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_prefetch_slot_says_what_the_replica_takes_it_to_mean_in_every_round(
    compared: list[int], seed: int, depth: int
) -> None:
    result = run_schedule(seed, depth=depth, profile=("llama", "gemma", "qwen-next")[seed % 3])

    assert result.violation is None, result.violation
    assert max(compared) > 0
