"""The rounds of a large group, without its processes: one replica, and a ballot for each rank.

Replicas that get equal commands and equal verdicts are equal. So one replica stands for those of all
ranks, and a second one for those of a group that folds flat. Ballots differ by rank, and each is a real
one: the replica tells it what to expect, and its rank's I/O tells it what has happened. A rank's I/O is
drawn from a seed: most of it ends in the round after its order, some of it later, and a little of it
falls short or fails. The share of ranks that are late or short is the smaller the more ranks there are,
since an operation takes as long as its slowest rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..coordinator.ballot import Answered, Ballot, Capped, Ended, Landed, Progress, Quiesced
from ..coordinator.collective import Vector
from ..coordinator.collectives.torch_gloo import GATHERED_BYTES_MAX
from ..coordinator.fold import disagreements, fold
from ..coordinator.lanes import BallotShape, LaneLayout, Voter
from ..coordinator.operation import Queue
from ..coordinator.verdict import Verdicts
from ..ranks.config import Bounds
from ..ranks.orders import Cancel, CopyToDevice, CopyToHost, Fetch, LookUp, Order, Put
from ..ranks.replica.check import check
from ..ranks.replica.digest import state_digest
from ..ranks.replica.effects import Effects
from ..ranks.replica.replica import Replica
from ..ranks.replica.settings import ReplicaConfig
from ..ranks.tallies import Tallies
from . import host_ring
from .checkers.findings.finding import Violated
from .checkers.findings.group import ReplicasDiffer, Restless

PAGE_TOKENS = 16
_TOKEN_BYTES = 4

LATE, SHORT = 0.5, 0.1
"""How many ranks of the whole group, on average, are late with an order, and find one page too few of
what storage is asked for."""

ROUNDS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdSettings:
    """The size of a group, and what is in flight in it when its rounds begin."""

    ranks: int
    hosts: int
    operations: int
    """Operations in flight at first. Half of them are prefetches with a seat, and an eighth are
    prefetches that wait for one. A quarter are copies to the host, and an eighth are writes to storage,
    each in its queue."""
    pages: int = 2
    """How many pages each operation has."""
    failing: float = 0.004
    """How many ranks of the whole group, on average, fail to carry out a copy or write. In each round a
    queue settles up to the first operation that failed, so that many failures take many rounds."""
    seed: int = 0

    @property
    def seats(self) -> int:
        """How many seats the ballot has; all are taken at first."""
        return max(1, self.operations // 2)

    @property
    def persists(self) -> int:
        """How many writes to storage are in flight at first."""
        return self.operations // 8

    @property
    def backups(self) -> int:
        """How many copies to the host are in flight at first."""
        return self.operations // 4

    @property
    def prefetches(self) -> int:
        """How many prefetches are in flight at first, with those that wait for a seat."""
        return self.operations - self.persists - self.backups

    def ranks_by_host(self) -> list[range]:
        """Return the ranks of each host: equally many on each, and perhaps fewer on the last."""
        each = -(-self.ranks // self.hosts)
        return [range(at, min(at + each, self.ranks)) for at in range(0, self.ranks, each)]


def new_replica(settings: CrowdSettings) -> Replica:
    """Return a replica with room for all that is to be in flight."""
    pages = settings.operations * settings.pages
    return Replica(
        ReplicaConfig(
            page_tokens=PAGE_TOKENS,
            device_pages=2 * pages,
            host_pages=4 * pages,
            has_store=True,
            model_digest=b"crowd",
            bounds=Bounds(
                prefetches=settings.seats,
                prefetches_waiting=settings.operations,
                persists=max(1, settings.operations),
                persists_waiting=settings.operations,
                prefetch_pages=2 * pages,
            ),
        )
    )


def compute(replica: Replica, settings: CrowdSettings, numbers: range) -> Iterator[Effects]:
    """Let each request compute a prompt and leave, so that the prompt is backed up."""
    for number in numbers:
        name, tokens = f"request {number}", _prompt(settings, number)
        yield replica.load_back(name, "", b"", len(tokens) // _TOKEN_BYTES)[1]
        yield replica.insert(name, tokens, final=True)[1]
        yield replica.release(name)[1]


def prefetch(replica: Replica, settings: CrowdSettings, numbers: range) -> Iterator[Effects]:
    """Let each request prefetch a prompt, which storage may have."""
    for number in numbers:
        yield replica.prefetch(f"request {number}", "", _prompt(settings, number))[1]


def _prompt(settings: CrowdSettings, number: int) -> bytes:
    tokens = np.full(settings.pages * PAGE_TOKENS, number, dtype="<i4")
    return tokens.tobytes()


class RankIO:
    """What becomes of one rank's orders, drawn from a seed."""

    def __init__(self, settings: CrowdSettings, rank: int) -> None:
        self._random = np.random.default_rng((settings.seed, rank))
        self._late, self._short = LATE / settings.ranks, SHORT / settings.ranks
        self._failing = settings.failing / settings.ranks
        self._owed: list[Progress] = []

    def obey(self, orders: Sequence[Order]) -> list[Progress]:
        """Return what is reported in this round about these orders and about earlier ones."""
        said, self._owed = self._owed, []
        drawn = self._random.random((2, len(orders)))
        late = (drawn[0] < self._late).tolist()
        fate: list[float] = drawn[1].tolist()
        for order, is_late, drawn_fate in zip(orders, late, fate, strict=True):
            odds = self._short if isinstance(order, LookUp | Fetch) else self._failing
            (self._owed if is_late else said).extend(outcome(order, short=drawn_fate < odds))
        return said


def outcome(order: Order, *, short: bool) -> tuple[Progress, ...]:
    """Return what is reported of an order that is carried out in full, or one page short."""
    match order:
        case LookUp():
            return (Answered(order.operation, len(order.needs[0].keys) - short),)
        case Fetch():
            pages = sum(len(each.keys) for each in order.transfers)
            if short:
                return Landed(order.operation, pages - 1), Capped(order.operation, pages - 1)
            return (Landed(order.operation, pages),)
        case CopyToHost() | CopyToDevice() | Put():
            return (Ended(order.operation, ok=not short),)
        case Cancel():
            return (Quiesced(order.operation),)
        case _:
            return ()


@dataclass(slots=True)
class CrowdSamples:
    """How many seconds each part of a round has taken, one sample for each time."""

    note_s: list[float] = field(default_factory=list[float])
    """Seconds for each report; one sample for every rank and round that had reports."""
    fill_s: list[float] = field(default_factory=list[float])
    fold_host_s: list[float] = field(default_factory=list[float])
    fold_flat_s: list[float] = field(default_factory=list[float])
    verdict_s: list[float] = field(default_factory=list[float])
    """One sample for each round, as in the two lists below."""
    apply_s: list[float] = field(default_factory=list[float])
    changes: list[int] = field(default_factory=list[int])
    """How many seats and queues the verdict has named."""


@dataclass(slots=True)
class CrowdCounts:
    """What all ranks together have moved in the last round."""

    cells_written: int = 0
    rows_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    messages_between: int = 0
    bytes_between: int = 0
    steps_between: int = 0


class CrowdRounds:
    """The rounds of a group whose ranks are all in this process. Single-threaded.

    Every round is folded within each host and then between hosts, and a second time flat. Raises
    `Violated` where the two folds differ by a bit, or where the replicas that get one or the other do.
    """

    def __init__(self, settings: CrowdSettings, clock: Callable[[], float]) -> None:
        """`clock` gives seconds, which are only measured: nothing depends on them."""
        self.settings = settings
        self.shape = BallotShape(world_size=settings.ranks, seats=settings.seats)
        self.samples = CrowdSamples()
        self.counts = CrowdCounts()
        self.rounds = self.rounds_before = 0
        """Rounds so far, and how many of them were run before all was in flight."""
        self._clock = clock
        self._ballots = [Ballot(self.shape, rank) for rank in range(settings.ranks)]
        self._ios = [RankIO(settings, rank) for rank in range(settings.ranks)]
        self.replica, self.flat_replica = new_replica(settings), new_replica(settings)
        self.tallies = Tallies()
        self._orders: list[Order] = []
        """Given since the last round."""
        self._verdicts, self._flat_verdicts = Verdicts(self.shape), Verdicts(self.shape)
        persists, backups = settings.persists, settings.backups
        self._every(lambda replica: compute(replica, settings, range(persists)))
        # Their copies end here, so that the writes of what they copied are in flight.
        while persists and len(self.replica.agenda.queues()[Queue.PERSIST]) < persists:
            self.run_round(calm=True)
        computed = range(persists, persists + backups)
        wanted = range(computed.stop, computed.stop + settings.prefetches)
        self._every(lambda replica: compute(replica, settings, computed))
        self._every(lambda replica: prefetch(replica, settings, wanted))
        self.samples = CrowdSamples()
        self.rounds_before = self.rounds

    def _every(self, commands: Callable[[Replica], Iterator[Effects]]) -> None:
        for effects in commands(self.replica):
            self._follow(effects)
        for _ in commands(self.flat_replica):
            pass

    def _follow(self, effects: Effects) -> None:
        """Hand the effects of a command to the ballots of all ranks."""
        self._orders += effects.orders
        self.tallies.fold(effects.notices)
        for ballot in self._ballots:
            ballot.follow(effects.expectations)

    def run(self) -> None:
        """Run rounds until nothing is in flight."""
        while not self.replica.idle:
            if self.rounds - self.rounds_before >= ROUNDS_MAX:
                raise Violated(Restless("operations do not end", ROUNDS_MAX))
            self.run_round()
        check(self.replica)
        check(self.flat_replica)

    def run_round(self, *, calm: bool = False) -> None:
        """Run one round; if it is `calm`, every rank does at once what it was ordered to."""
        orders, self._orders = self._orders, []
        self.rounds += 1
        self._note(orders, calm=calm)
        layout = LaneLayout(
            epoch=1,
            round=self.rounds,
            state_digest=self.replica.digest,
            seats=self.replica.seats(),
        )
        self.counts = CrowdCounts()
        rows = self._fill(layout)
        flat = self._timed(self.samples.fold_flat_s, lambda: fold(rows))
        folded = self._fold_by_host(rows)
        for each in folded:
            if not np.array_equal(each, flat):
                raise Violated(ReplicasDiffer(f"the folds of round {self.rounds} differ"))
        if disagreements(flat):
            raise Violated(ReplicasDiffer(f"the ranks differ in {disagreements(flat)}"))
        self._apply(layout, folded[0], flat)

    def _timed(self, samples_s: list[float], thing: Callable[[], Vector]) -> Vector:
        began = self._clock()
        made = thing()
        samples_s.append(self._clock() - began)
        return made

    def _note(self, orders: Sequence[Order], *, calm: bool) -> None:
        for ballot, io in zip(self._ballots, self._ios, strict=True):
            if calm:
                said = [each for order in orders for each in outcome(order, short=False)]
            else:
                said = io.obey(orders)
            began = self._clock()
            for progress in said:
                ballot.note(progress)
            if said:
                self.samples.note_s.append((self._clock() - began) / len(said))

    def _fill(self, layout: LaneLayout) -> list[Vector]:
        """Let every rank write its cell of the round."""
        voter = Voter(healthy=True, time_ms=1000 + self.rounds)
        rows: list[Vector] = []
        for ballot in self._ballots:
            began = self._clock()
            rows.append(ballot.fill(layout, voter))
            self.samples.fill_s.append(self._clock() - began)
            self._write(rows[-1])
        return rows

    def _fold_by_host(self, rows: Sequence[Vector]) -> list[Vector]:
        """Return what each host's ranks read in the end, as with the transport `hierarchical`."""
        said: list[Vector] = []
        hosts = self.settings.ranks_by_host()
        for ranks in hosts:
            of_host = rows[ranks.start : ranks.stop]
            for row in of_host:
                self._read(row)
            folded = self._timed(self.samples.fold_host_s, partial(fold, of_host))
            # One lane more would tell the other hosts how this one's group has ended.
            said.append(np.append(folded, np.iinfo(np.int64).max))
        gathers = said[0].nbytes <= GATHERED_BYTES_MAX
        exchanged = (host_ring.gather if gathers else host_ring.reduce)(said)
        self.counts.messages_between += exchanged.messages
        self.counts.bytes_between += exchanged.payload_bytes
        self.counts.steps_between += exchanged.steps
        results = [each[:-1] for each in exchanged.folded]
        for ranks, result in zip(hosts, results, strict=True):
            self._write(result)
            for _ in ranks:
                self._read(result)
        return results

    def _write(self, lanes: Vector) -> None:
        self.counts.cells_written += 1
        self.counts.bytes_written += lanes.nbytes

    def _read(self, lanes: Vector) -> None:
        self.counts.rows_read += 1
        self.counts.bytes_read += lanes.nbytes

    def _apply(self, layout: LaneLayout, folded: Vector, flat: Vector) -> None:
        self._follow(self.replica.apply(self._verdicts.read(layout, folded)))
        began = self._clock()
        verdict = self._flat_verdicts.read(layout, flat)
        read = self._clock()
        self.flat_replica.apply(verdict)
        self.samples.verdict_s.append(read - began)
        self.samples.apply_s.append(self._clock() - read)
        self.samples.changes.append(len(verdict.seats) + len(verdict.watermarks))
        if self.replica.digest != self.flat_replica.digest:
            raise Violated(ReplicasDiffer(f"the replicas differ after round {self.rounds}"))
        if state_digest(self.replica) != state_digest(self.flat_replica):
            how = f"the replicas' states differ after round {self.rounds}"
            raise Violated(ReplicasDiffer(how))
