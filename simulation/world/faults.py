"""The faults of a schedule: their kinds, their rates, and the steps in which they strike.

For each schedule, the seed decides which kinds of fault are on. A rare pair of kinds can thus occur in
a schedule that has no other kinds. Every fault that strikes is counted by kind.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random


class Mishap(StrEnum):
    """The kinds of fault that the simulator can cause."""

    MISSING_PAGE = "missing_page"
    """Fault: at a read, one rank's store turns out to lack a page that was written."""
    LOST_OBJECT = "lost_object"
    """Fault: one rank's store loses an object at some moment, without being accessed."""
    CORRUPT_PAGE = "corrupt_page"
    """Fault: a read finds corrupt bytes, so the store drops the object."""
    FAILED_READ = "failed_read"
    """Fault: a read ends with an error."""
    HUNG_READ = "hung_read"
    """Fault: a read outlives its deadline; it completes late, very late, or never."""
    LATE_WRITE = "late_write"
    """Fault: a hung read writes into its slot after the quiesce deadline."""
    SLOW_STORE = "slow_store"
    """Fault: the store takes many times as long as usual for one order."""
    LOOKUP_TOO_MANY = "lookup_too_many"
    """Fault: a lookup reports objects that do not exist."""
    LOOKUP_TOO_FEW = "lookup_too_few"
    """Fault: a lookup misses objects that exist."""
    LOOKUP_SILENT = "lookup_silent"
    """Fault: a lookup is never answered."""
    FAILED_PERSIST = "failed_persist"
    """Fault: a write ends with an error."""
    LOST_WRITE = "lost_write"
    """Fault: a write reports success, but nothing was stored."""
    HUNG_PERSIST = "hung_persist"
    """Fault: a write outlives its deadline and goes on reading its host page."""
    FAILED_COPY = "failed_copy"
    """Fault: a copy between device and host ends with an error."""
    SPOILED_SAVE = "spoiled_save"
    """Fault: a retracted request's data changes while it is in host memory."""
    HUNG_COPY = "hung_copy"
    """Fault: a copy between device and host outlives its deadline."""
    REPEATED_REPORT = "repeated_report"
    """Fault: a progress report is repeated, perhaps after its operation has ended."""
    LATE_REPORT = "late_report"
    """Fault: a progress report arrives after reports that were sent later."""
    SLOW_RANK = "slow_rank"
    """Fault: one rank's transfers take several times as long as the others'."""
    CLOCK_SKEW = "clock_skew"
    """Fault: the ranks' clocks show different times throughout the schedule."""
    CLOCK_LEAP = "clock_leap"
    """Fault: the clock of one rank, or of all of them, leaps ahead."""
    CLOCK_STILL = "clock_still"
    """Fault: the clock of one rank, or of all of them, stands still for a while."""
    TINY_POOLS = "tiny_pools"
    """Fault: host and device pools can hold only a fraction of the pages in use."""
    TINY_BOUNDS = "tiny_bounds"
    """Fault: the limits on the numbers of running and waiting prefetches and persists are very small.
    """
    ABORTED_REQUEST = "aborted_request"
    """Fault: the engine aborts a request at a random moment."""
    DEAD_RANK = "dead_rank"
    """Fault: a rank's process dies, and the other ranks' transport detects the death."""
    SILENT_RANK = "silent_rank"
    """Fault: a rank stops launching rounds; the other ranks detect this by a timeout only."""
    UNHEALTHY_RANK = "unhealthy_rank"
    """Fault: a rank reports that it cannot continue."""
    SAMPLED_APART = "sampled_apart"
    """Fault: the engine of one rank samples as many tokens as the other ranks' engines, but different
    ones."""
    RESTART = "restart"
    """Fault: all processes of the group end and restart on the same stores."""


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
"""By kind of fault: the chance that it strikes at each opportunity (a page read, an order, a report).

These are base rates; a schedule multiplies them by factors drawn from its seed.
"""

GROUP_FAULTS = {
    Mishap.DEAD_RANK: (0.12,),
    Mishap.SILENT_RANK: (0.05,),
    Mishap.UNHEALTHY_RANK: (0.08,),
    Mishap.RESTART: (0.8, 0.5),
}
"""By fault that ends the epoch: its chances to strike in a schedule, with one draw for each. RESTART
has two chances, so it may strike twice.

After such a fault, the schedule continues with new processes on the old stores.
"""
_SAMPLED_APART_SHARE = 0.12
_CLOCK_FAULTS = {Mishap.CLOCK_LEAP: (300, 5_000), Mishap.CLOCK_STILL: (100, 1_000)}
"""By clock fault: the two possible durations in milliseconds, of which one is drawn."""
_CLOCK_FAULTS_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultProfile:
    """A named set of fault kinds and chances, from which a schedule's faults are drawn."""

    about: str
    """One line that describes the profile in `--help`."""
    faults: frozenset[Mishap]
    """The kinds of fault that the seed may switch on."""
    calm: float = 0.04
    """The share of schedules in which all faults are off."""
    always: frozenset[Mishap] = frozenset()
    """The kinds of fault that are on in every schedule that has faults."""
    retracted: float = 0.03
    """The chance, per action of a computing request, that the engine retracts the request."""
    controlled: float = 0.0
    """The chance per step that an operator drops a namespace, changes limits, or renames the weights.
    """


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
        about="no faults; at most the group restarts on its store",
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
        about="far too small pools, so that requests are constantly retracted and resumed",
        faults=frozenset({Mishap.TINY_POOLS}),
        calm=0.0,
        always=frozenset({Mishap.TINY_POOLS}),
        retracted=0.5,
    ),
    "controls": FaultProfile(
        about="tiny pools, and an operator who drops namespaces and changes limits and weights",
        faults=_PRESSURE | _STORAGE,
        calm=0.2,
        controlled=0.1,
    ),
}
"""The fault profiles of `lockstep simulate --faults`."""


@dataclass(frozen=True, slots=True)
class ClockFault:
    """A clock that leaps or stops, on one or all ranks, in one step."""

    fault: Mishap
    ranks: tuple[int, ...]
    duration_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishaps:
    """The faults drawn for one schedule."""

    rates: Mapping[Mishap, float]
    """By kind of fault that is switched on: chance that it strikes at one opportunity."""
    paces: tuple[float, ...]
    """By rank: the factor by which the rank's transfers take longer than usual."""
    skews_ms: tuple[int, ...]
    """By rank: how many milliseconds the rank's clock is ahead of the group's clock."""
    tiny_pools: bool
    tiny_bounds: bool
    group_faults: Mapping[int, tuple[Mishap, int]]
    """By step: (fault that ends the epoch in this step, rank that it strikes)."""
    clock_faults: Mapping[int, ClockFault] = field(default_factory=dict[int, ClockFault])
    """By step: the clock fault in this step."""

    @property
    def still_us(self) -> int:
        """Upper bound, in microseconds, of the total time for which clock faults stop agreed time."""
        faults = self.clock_faults.values()
        stills = (each.duration_ms for each in faults if each.fault is Mishap.CLOCK_STILL)
        return 1000 * sum(stills)

    @property
    def calm(self) -> bool:
        """Whether storage, copies and reports have no faults, and no rank is lost."""
        kinds = {fault for fault, _ in self.group_faults.values()}
        return not self.rates and kinds <= {Mishap.RESTART}


@dataclass(slots=True)
class FaultSource:
    """Decides whether faults strike, by draws from a separate stream of the seed, and counts them."""

    plan: Mishaps
    random: Random
    counts: Counter[str] = field(default_factory=Counter[str])
    over: bool = False
    """Whether all faults and slow ranks are switched off from now on."""

    def strikes(self, fault: Mishap) -> bool:
        """Draw whether `fault` strikes now, and count it if so."""
        rate = self.plan.rates.get(fault)
        if self.over or rate is None or self.random.random() >= rate:
            return False
        self.counts[fault.value] += 1
        return True

    def count(self, fault: Mishap) -> None:
        """Count a fault that another part of the simulation has drawn."""
        self.counts[fault.value] += 1


def draw_plan(random: Random, apart: Random, *, profile: str, ranks: int, steps: int) -> Mishaps:
    """Draw a schedule's faults.

    Some faults are drawn from the separate random stream `apart`, so that these draws do not change the
    other draws of the seed.
    """
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
