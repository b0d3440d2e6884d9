"""The index: which pages each group has, by key, and how much of a prompt that is.

What it has of a group is exact, or it says that it is not. It is exact if it began with the group's
life or with a snapshot, has applied every batch since, and has heard of no batch that it lacks. So it
is exact as of the last batch that it has heard of (`Standing.through`); that nothing newer is on its
way, no reader can know. A group that also tells now and then how far it is (`heard`) makes a lost
last batch show in that time.

Losing, repeating or delaying batches and snapshots changes nothing but whether it is exact.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...replica.notices import Tier
from .kv_events import (
    NOTHING_YET,
    TIERS,
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    Snapshot,
)

NO_LIFE = -1
"""The life of a group of which nothing was heard."""


class Standing(NamedTuple):
    """How far the index is with a group."""

    exact: bool
    life: int
    through: int
    """The last batch that was applied; what there is of the group is as it was after this one."""
    heard: int
    """The last batch that was heard of."""


class Hit(NamedTuple):
    """How much of a prompt a group has, in pages."""

    pages: int
    """Pages from the first on, each on the device or in host memory."""
    device_pages: int
    """Pages from the first on, each on the device."""


@dataclass(slots=True)
class _Part:
    """What is known of one group."""

    bit: int
    life: int = NO_LIFE
    through: int | None = None
    """The last batch that was applied; None as long as nothing is known to begin from."""
    heard: int = NOTHING_YET
    held: dict[Tier, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in TIERS})

    @property
    def exact(self) -> bool:
        return self.through == self.heard


class PrefixIndex:
    """What every group has, in one table from keys to groups.

    A query costs in proportion to the longest prefix found; a batch to the pages that it names; to
    clear or replace what a group has costs what it had and has. Groups that come and go reuse their
    places.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._names: dict[int, str] = {}
        self._holders: dict[Tier, dict[bytes, int]] = {tier: {} for tier in TIERS}
        """By tier: the groups that have a page, as bits."""
        self._exact = 0
        """The groups of which the index is exact, as bits."""

    def apply(self, group: str, batch: EventBatch) -> bool:
        """Take a batch in; return whether the index is exact of the group now.

        If not, whoever reads the group's events asks for those after `standing(group).through`, or
        for a snapshot.
        """
        part = self._part_of_life(group, batch.life)
        if part is None:
            return self._parts[group].exact
        if part.through is None and not batch.sequence:
            # A life begins with nothing.
            part.through = NOTHING_YET
        part.heard = max(part.heard, batch.sequence)
        if part.through is not None and batch.sequence == part.through + 1:
            for event in batch.events:
                self._follow(part, event)
            part.through = batch.sequence
        return self._judge(part)

    def heard(self, group: str, life: int, sequence: int) -> bool:
        """Take note of how far a group is; return whether the index is exact of it."""
        part = self._part_of_life(group, life)
        if part is None:
            return self._parts[group].exact
        if part.through is None and sequence == NOTHING_YET:
            part.through = NOTHING_YET
        part.heard = max(part.heard, sequence)
        return self._judge(part)

    def restore(self, group: str, snapshot: Snapshot) -> bool:
        """Begin anew from a snapshot, unless it is older than what is there; as `apply`."""
        part = self._part_of_life(group, snapshot.life)
        if part is None:
            return self._parts[group].exact
        part.heard = max(part.heard, snapshot.sequence)
        if part.through is None or part.through < snapshot.sequence:
            self._clear(part)
            for tier, keys in snapshot.held.items():
                self._add(part, tier, keys)
            part.through = snapshot.sequence
        return self._judge(part)

    def forget(self, group: str) -> None:
        """Drop all that is known of a group, which is gone."""
        part = self._parts.pop(group, None)
        if part is not None:
            self._clear(part)
            self._exact &= ~part.bit
            del self._names[part.bit]

    def standing(self, group: str) -> Standing:
        """Say how far the index is with a group."""
        part = self._parts.get(group)
        if part is None:
            return Standing(exact=False, life=NO_LIFE, through=NOTHING_YET, heard=NOTHING_YET)
        through = NOTHING_YET if part.through is None else part.through
        return Standing(exact=part.exact, life=part.life, through=through, heard=part.heard)

    def held(self, group: str) -> dict[Tier, frozenset[bytes]]:
        """Return the keys of all pages that a group has, by tier."""
        part = self._parts[group]
        return {tier: frozenset(keys) for tier, keys in part.held.items()}

    def hits(self, keys: Iterable[bytes]) -> dict[str, Hit]:
        """Return how much each group has of a prompt with these page keys, if it has any of it.

        Groups of which the index is not exact are left out. No more keys are taken than the longest
        prefix has, and one.
        """
        on_device, on_host = (self._holders[tier] for tier in TIERS)
        anywhere = device = self._exact
        pages: dict[int, int] = {}
        device_pages: dict[int, int] = {}
        at = 0
        for key in keys:
            there = on_device.get(key, 0)
            _end(device & ~there, at, device_pages)
            device &= there
            there |= on_host.get(key, 0)
            _end(anywhere & ~there, at, pages)
            anywhere &= there
            if not anywhere:
                break
            at += 1
        _end(device, at, device_pages)
        _end(anywhere, at, pages)
        return {
            self._names[bit]: Hit(length, device_pages[bit])
            for bit, length in pages.items()
            if length
        }

    def _part_of_life(self, group: str, life: int) -> _Part | None:
        """Return a group's part, begun anew where this is a later life; None for an earlier one."""
        part = self._parts.get(group)
        if part is None:
            bit = 1
            while bit in self._names:
                bit <<= 1
            part = self._parts[group] = _Part(bit)
            self._names[bit] = group
        if life < part.life:
            return None
        if life > part.life:
            self._clear(part)
            part.life, part.through, part.heard = life, None, NOTHING_YET
        return part

    def _judge(self, part: _Part) -> bool:
        if part.exact:
            self._exact |= part.bit
        else:
            self._exact &= ~part.bit
        return part.exact

    def _follow(self, part: _Part, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self._clear(part)
        elif isinstance(event, BlockStored):
            self._add(part, event.tier, event.keys)
        else:
            self._remove(part, event.tier, event.keys)

    def _add(self, part: _Part, tier: Tier, keys: Iterable[bytes]) -> None:
        holders, held, bit = self._holders[tier], part.held[tier], part.bit
        for key in keys:
            held.add(key)
            holders[key] = holders.get(key, 0) | bit

    def _remove(self, part: _Part, tier: Tier, keys: Iterable[bytes]) -> None:
        holders, held, bit = self._holders[tier], part.held[tier], part.bit
        for key in keys:
            if key not in held:
                continue
            held.discard(key)
            if holders[key] == bit:
                del holders[key]
            else:
                holders[key] &= ~bit

    def _clear(self, part: _Part) -> None:
        for tier in TIERS:
            self._remove(part, tier, tuple(part.held[tier]))


def _end(bits: int, length: int, lengths: dict[int, int]) -> None:
    """Take note that the prefixes of some groups end here."""
    while bits:
        bit = bits & -bits
        lengths[bit] = length
        bits ^= bit
