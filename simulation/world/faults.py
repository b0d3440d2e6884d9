"""What goes wrong in a schedule: which kinds of fault, how often, and at which step.

Every schedule has its own selection: the seed switches each kind on or off, so that rare pairs of
faults also meet without all the others. Every fault that strikes is counted by its kind.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random


class Mishap(StrEnum):
    """The kinds of fault."""

    MISSING_PAGE = "missing_page"
    """One rank's store does not have a page that was written."""
    LOST_OBJECT = "lost_object"
    """One rank's store drops an object of its own accord."""
    CORRUPT_PAGE = "corrupt_page"
    """A read finds bytes that are not the object, and the store drops it."""
    FAILED_READ = "failed_read"
    """A read ends with an error."""
    HUNG_READ = "hung_read"
    """A read outlives its deadline; it ends late, very late, or never."""
    LATE_WRITE = "late_write"
    """A hung read writes into its slot after the wait for quiet was given up."""
    SLOW_STORE = "slow_store"
    """One order takes many times as long as others."""
    LOOKUP_TOO_MANY = "lookup_too_many"
    """A lookup counts objects that are not there."""
    LOOKUP_TOO_FEW = "lookup_too_few"
    """A lookup does not see objects that are there."""
    LOOKUP_SILENT = "lookup_silent"
    """A lookup is never answered."""
    FAILED_PERSIST = "failed_persist"
    """A write ends with an error."""
    LOST_WRITE = "lost_write"
    """A write ends well, and nothing was stored."""
    HUNG_PERSIST = "hung_persist"
    """A write outlives its deadline, reading its host page all the while."""
    FAILED_COPY = "failed_copy"
    """A copy between device and host ends with an error."""
    SPOILED_SAVE = "spoiled_save"
    """A host page that a request has saved changes while it lies there."""
    HUNG_COPY = "hung_copy"
    """A copy outlives its deadline."""
    REPEATED_REPORT = "repeated_report"
    """A report comes again, perhaps after its operation has ended."""
    LATE_REPORT = "late_report"
    """A report comes later than those that follow it."""
    SLOW_RANK = "slow_rank"
    """One rank's transfers take several times as long as the others'."""
    CLOCK_SKEW = "clock_skew"
    """The ranks' clocks differ."""
    CLOCK_LEAP = "clock_leap"
    """The clock of one rank, or of all of them, leaps ahead."""
    CLOCK_STILL = "clock_still"
    """The clock of one rank, or of all of them, stands still for a while."""
    TINY_POOLS = "tiny_pools"
    """The pools hold a fraction of what is in use."""
    TINY_BOUNDS = "tiny_bounds"
    """Few operations may be in flight, and few may wait."""
    ABORTED_REQUEST = "aborted_request"
    """The engine aborts a request at some moment of its life."""
    DEAD_RANK = "dead_rank"
    """A rank's process ends, and its transport notices."""
    SILENT_RANK = "silent_rank"
    """A rank launches no round any more, and nobody notices but by time."""
    UNHEALTHY_RANK = "unhealthy_rank"
    """A rank says that it cannot go on."""
    SAMPLED_APART = "sampled_apart"
    """The ranks' engines put out different tokens, equal in count."""
    RESTART = "restart"
    """All processes end and start again upon the same stores."""


BASE_RATES: Mapping[Mishap, float] = {
    Mishap.MISSING_PAGE: 0.05,
    Mishap.LOST_OBJECT: 0.03,
    Mishap.CORRUPT_PAGE: 0.05,
    Mishap.FAILED_READ: 0.05,
    Mishap.HUNG_READ: 0.06,
    Mishap.SLOW_STORE: 0.1,
    Mishap.LOOKUP_TOO_MANY: 0.15,
    Mishap.LOOKUP_TOO_FEW: 0.1,
    Mishap.LOOKUP_SILENT: 0.08,
    Mishap.FAILED_PERSIST: 0.08,
    Mishap.LOST_WRITE: 0.05,
    Mishap.HUNG_PERSIST: 0.03,
    Mishap.FAILED_COPY: 0.04,
    Mishap.HUNG_COPY: 0.02,
    Mishap.REPEATED_REPORT: 0.1,
    Mishap.LATE_REPORT: 0.1,
    Mishap.ABORTED_REQUEST: 0.02,
}
"""How often a fault strikes where it can (a page read, an order, a report), before the seed scales
it."""

GROUP_FAULTS = {
    Mishap.DEAD_RANK: (0.12,),
    Mishap.SILENT_RANK: (0.05,),
    Mishap.UNHEALTHY_RANK: (0.08,),
    Mishap.RESTART: (0.8, 0.5),
}
"""Faults that end the group's epoch, with the chance of a first one in a schedule and of a second. The
schedule goes on with new processes over the old stores."""
_SAMPLED_APART_SHARE = 0.12
_CLOCK_FAULTS = {Mishap.CLOCK_LEAP: (300, 5_000), Mishap.CLOCK_STILL: (100, 1_000)}
"""For how many milliseconds a clock leaps ahead or stands still: one number or the other."""
_CLOCK_FAULTS_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultProfile:
    """What the faults of a schedule are drawn from, under one name."""

    about: str
    """One line about the profile for `--help`."""
    faults: frozenset[Mishap]
    """The kinds of fault that may be switched on."""
    calm: float = 0.04
    """The share of schedules without any fault."""
    always: frozenset[Mishap] = frozenset()
    """The kinds that are on in every schedule."""
    retracted: float = 0.03
    """How often an engine retracts a request that computes, where it can."""
    controlled: float = 0.0
    """How often an operator drops a namespace, gives one other limits, or names other weights."""


_STORAGE = frozenset(
    {
        Mishap.MISSING_PAGE,
        Mishap.LOST_OBJECT,
        Mishap.CORRUPT_PAGE,
        Mishap.FAILED_READ,
        Mishap.HUNG_READ,
        Mishap.SLOW_STORE,
        Mishap.LOOKUP_TOO_MANY,
        Mishap.LOOKUP_TOO_FEW,
        Mishap.LOOKUP_SILENT,
        Mishap.FAILED_PERSIST,
        Mishap.LOST_WRITE,
        Mishap.HUNG_PERSIST,
        Mishap.RESTART,
    }
)
_PRESSURE = frozenset({Mishap.TINY_POOLS, Mishap.TINY_BOUNDS, Mishap.ABORTED_REQUEST})

FAULT_PROFILES: Mapping[str, FaultProfile] = {
    "mixed": FaultProfile(
        about="every kind of fault, a selection for each seed", faults=frozenset(Mishap)
    ),
    "calm": FaultProfile(
        about="no faults; at most the group starts again on its store",
        faults=frozenset({Mishap.RESTART}),
        calm=0.5,
    ),
    "storage": FaultProfile(about="faults of storage only", faults=_STORAGE, calm=0.0),
    "pressure": FaultProfile(about="tiny pools and bounds, and aborts", faults=_PRESSURE, calm=0.0),
    "crash": FaultProfile(
        about="storage faults, and ranks that die",
        faults=_STORAGE | GROUP_FAULTS.keys() | {Mishap.SAMPLED_APART},
        calm=0.0,
    ),
    "retracts": FaultProfile(
        about="pools that are far too small, and requests that are retracted and resumed all the time",
        faults=frozenset({Mishap.TINY_POOLS}),
        calm=0.0,
        always=frozenset({Mishap.TINY_POOLS}),
        retracted=0.5,
    ),
    "controls": FaultProfile(
        about="an operator who drops namespaces, changes limits and weights, and tiny pools",
        faults=_PRESSURE | _STORAGE,
        calm=0.2,
        controlled=0.1,
    ),
}
"""The profiles that `lockstep simulate --faults` knows."""


@dataclass(frozen=True, slots=True)
class ClockFault:
    """What happens to the clocks of some ranks at one step."""

    fault: Mishap
    ranks: tuple[int, ...]
    duration_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishaps:
    """The faults of one schedule."""

    rates: Mapping[Mishap, float]
    """How often each kind strikes where it can; kinds that are switched off are left out."""
    paces: tuple[float, ...]
    """By what factor each rank's transfers are slower than usual, by rank."""
    skews_ms: tuple[int, ...]
    """How far each rank's clock is ahead, by rank."""
    tiny_pools: bool
    tiny_bounds: bool
    group_faults: Mapping[int, tuple[Mishap, int]]
    """The fault that ends the epoch at a step, and the rank that it strikes, by step."""
    clock_faults: Mapping[int, ClockFault] = field(default_factory=dict[int, ClockFault])
    """What happens to clocks, by step."""

    @property
    def still_us(self) -> int:
        """How long the time that the ranks agree on stands still in all, at most."""
        faults = self.clock_faults.values()
        stills = (each.duration_ms for each in faults if each.fault is Mishap.CLOCK_STILL)
        return 1000 * sum(stills)

    @property
    def calm(self) -> bool:
        """Whether storage, copies and reports all do what they should, and no rank is lost."""
        kinds = {fault for fault, _ in self.group_faults.values()}
        return not self.rates and kinds <= {Mishap.RESTART}


@dataclass(slots=True)
class FaultSource:
    """Draws from its own stream of the seed whether a fault strikes, and counts those that do."""

    plan: Mishaps
    random: Random
    counts: Counter[str] = field(default_factory=Counter[str])
    over: bool = False
    """Whether nothing fails, and no rank is slow, any more."""

    def strikes(self, fault: Mishap) -> bool:
        """Draw whether `fault` strikes now."""
        rate = self.plan.rates.get(fault)
        if self.over or rate is None or self.random.random() >= rate:
            return False
        self.counts[fault.value] += 1
        return True

    def count(self, fault: Mishap) -> None:
        """Count a fault that was drawn elsewhere."""
        self.counts[fault.value] += 1


def draw_plan(random: Random, apart: Random, *, profile: str, ranks: int, steps: int) -> Mishaps:
    """Draw the faults of a schedule; the stream `apart` is for draws that must not shift the others."""
    allowed = FAULT_PROFILES[profile].faults
    if random.random() < FAULT_PROFILES[profile].calm:
        allowed = frozenset[Mishap]()

    def chosen(fault: Mishap, share: float) -> bool:
        struck = random.random() < share or fault in FAULT_PROFILES[profile].always
        return struck and fault in allowed

    rates = {
        fault: rate * random.uniform(0.3, 2.0)
        for fault, rate in BASE_RATES.items()
        if chosen(fault, 0.4)
    }
    paces = [1.0] * ranks
    if chosen(Mishap.SLOW_RANK, 0.35):
        paces[random.randrange(ranks)] = random.choice((2.0, 4.0, 8.0))
    skews_ms = [0] * ranks
    if chosen(Mishap.CLOCK_SKEW, 0.4):
        skews_ms = [random.randrange(0, random.choice((50, 5_000))) for _ in range(ranks)]
    group_faults: dict[int, tuple[Mishap, int]] = {}
    for fault, shares in GROUP_FAULTS.items():
        for share in shares:
            if chosen(fault, share):
                step = random.randrange(steps // 5, steps - 10)
                group_faults.setdefault(step, (fault, random.randrange(ranks)))
    if apart.random() < _SAMPLED_APART_SHARE and Mishap.SAMPLED_APART in allowed:
        struck = (Mishap.SAMPLED_APART, apart.randrange(ranks))
        group_faults.setdefault(apart.randrange(steps // 5, steps - 10), struck)
    clock_faults: dict[int, ClockFault] = {}
    for fault, durations_ms in _CLOCK_FAULTS.items():
        if apart.random() < _CLOCK_FAULTS_SHARE and fault in allowed:
            clocks = tuple(range(ranks)) if apart.random() < 0.5 else (apart.randrange(ranks),)
            clock_fault = ClockFault(fault, clocks, apart.choice(durations_ms))
            clock_faults.setdefault(apart.randrange(steps), clock_fault)
    return Mishaps(
        rates=rates,
        paces=tuple(paces),
        skews_ms=tuple(skews_ms),
        tiny_pools=chosen(Mishap.TINY_POOLS, 0.5),
        tiny_bounds=chosen(Mishap.TINY_BOUNDS, 0.35),
        group_faults=group_faults,
        clock_faults=clock_faults,
    )
