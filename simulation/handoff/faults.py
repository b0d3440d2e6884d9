"""What goes wrong between two groups, by names that stand for a whole kind of trouble each."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from ..faults import Mishap, Mishaps


class HandoffFault(StrEnum):
    """The kinds of trouble that a handoff may meet."""

    READS = "reads"
    """Reads fail, find damaged bytes or nothing, and lookups are wrong in both directions."""
    HALF = "half-store"
    """The store drops half of what is written, and later half of what is left."""
    FLIPPED = "flipped-rank"
    """All that one rank of the group that prefills gives away is damaged on its way."""
    SLOW = "slow"
    """Reads and writes take long, or hang; one rank of each group is slower than the others."""
    GONE = "gone"
    """From some moment on nobody can connect to the page servers any more."""
    MESSAGES = "messages"
    """Control messages are lost, late, repeated, and overtake each other."""
    MANIFEST = "manifest"
    """Manifests are of something else, cut short, or have a flipped bit."""
    PREFILL_DIES = "prefill-dies"
    """The group that prefills ends with all of its processes."""
    DECODE_DIES = "decode-dies"
    """The group that decodes does."""
    ABORTS = "aborts"
    """Requests are aborted, on one side or on both."""
    SMALL_HOST = "small-host"
    """Host memory holds hardly more than one request, on one side or on both."""
    COPIES = "copies"
    """Copies and writes fail, and what a request has saved changes while it lies in host memory."""
    REPORTS = "reports"
    """Executors report late, and again."""
    CLOCKS = "clocks"
    """The ranks' clocks differ."""


CALM, MIXED = "calm", "mixed"
HANDOFF_FAULTS = (CALM, MIXED, *(each.value for each in HandoffFault))
"""What may be asked for: no trouble, a selection for each seed, or one kind alone."""

_GROUP_ENDS = (HandoffFault.PREFILL_DIES, HandoffFault.DECODE_DIES)
_RATES: Mapping[HandoffFault, Mapping[Mishap, float]] = {
    HandoffFault.READS: {
        Mishap.MISSING_PAGE: 0.05,
        Mishap.CORRUPT_PAGE: 0.05,
        Mishap.FAILED_READ: 0.05,
        Mishap.LOOKUP_TOO_MANY: 0.15,
        Mishap.LOOKUP_TOO_FEW: 0.1,
        Mishap.LOOKUP_SILENT: 0.08,
    },
    HandoffFault.HALF: {Mishap.LOST_WRITE: 0.5},
    HandoffFault.SLOW: {
        Mishap.HUNG_READ: 0.05,
        Mishap.SLOW_STORE: 0.2,
        Mishap.HUNG_PERSIST: 0.03,
    },
    HandoffFault.COPIES: {
        Mishap.FAILED_COPY: 0.05,
        Mishap.FAILED_PERSIST: 0.08,
        Mishap.SPOILED_SAVE: 0.1,
    },
    HandoffFault.REPORTS: {Mishap.REPEATED_REPORT: 0.1, Mishap.LATE_REPORT: 0.1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTroubles:
    """The trouble of one schedule."""

    kinds: frozenset[HandoffFault]
    prefill_dies_us: int | None
    decode_dies_us: int | None
    gone_us: int | None
    half_us: int | None
    """When the store drops half of what it has."""
    flipped_rank: int | None

    def has(self, kind: HandoffFault) -> bool:
        """Say whether a kind of trouble is switched on."""
        return kind in self.kinds


def draw_troubles(random: Random, faults: str, prefill_ranks: int) -> HandoffTroubles:
    """Draw the trouble of a schedule from what is asked for, one of `HANDOFF_FAULTS`."""
    kinds = set[HandoffFault]()
    for kind in HandoffFault:
        share = 0.1 if kind in _GROUP_ENDS else 0.3
        if faults == kind.value or (faults == MIXED and random.random() < share):
            kinds.add(kind)

    def moment(kind: HandoffFault) -> int | None:
        drawn = random.randrange(20_000, 1_200_000)
        return drawn if kind in kinds else None

    return HandoffTroubles(
        kinds=frozenset(kinds),
        prefill_dies_us=moment(HandoffFault.PREFILL_DIES),
        decode_dies_us=moment(HandoffFault.DECODE_DIES),
        gone_us=moment(HandoffFault.GONE),
        half_us=moment(HandoffFault.HALF),
        flipped_rank=random.randrange(prefill_ranks) if HandoffFault.FLIPPED in kinds else None,
    )


def mishaps_of(random: Random, troubles: HandoffTroubles, ranks: int) -> Mishaps:
    """Return what may strike the ranks of one group."""
    rates: dict[Mishap, float] = {}
    for kind in sorted(troubles.kinds):
        rates |= _RATES.get(kind, {})
    paces, skews_ms = [1.0] * ranks, [0] * ranks
    if troubles.has(HandoffFault.SLOW):
        paces[random.randrange(ranks)] = random.choice((2.0, 4.0))
    if troubles.has(HandoffFault.CLOCKS):
        skews_ms = [random.randrange(500) for _ in range(ranks)]
    return Mishaps(
        rates=rates,
        paces=tuple(paces),
        skews_ms=tuple(skews_ms),
        tiny_pools=False,
        tiny_bounds=False,
        group_faults={},
    )
