"""KV events: what a group has cached, told to whoever routes requests to it.

They are folded from the notices of a replica and from nothing else, so any one rank may tell them.
Events leave in numbered batches. A reader that has missed some asks for those after the last it has;
where they are not kept any more it begins anew from a snapshot, which says for which number it stands.

Told is full attention on the device and in host memory, page by page. Storage is left out: nobody tells
a group what leaves a store, and all groups that share one have the same of it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

from ....errors import ConfigError
from ...orders import KV_POOL
from ...replica.notices import Notice, Removed, Reset, Stored, Tier

TIERS = (Tier.DEVICE, Tier.HOST)
"""The tiers that are told of."""

REPLAY_PAGES_MAX = 1 << 18
"""How many pages the batches may name that are kept for readers that have missed some."""

NOTHING_YET = -1
"""The number of the last batch where there was none."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages came to a tier where they were not, in prefix order."""

    tier: Tier
    keys: tuple[bytes, ...]
    after: bytes | None = None
    """The key of the page before the first; None if that begins a prefix."""
    tokens: bytes = b""
    """The tokens of the pages, as the replica has them; empty where nobody has told them."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages left a tier."""

    tier: Tier
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached on any tier, but for what the events after this one name."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """What has changed at once."""

    life: int
    """The life of the group that tells this. One that begins later has a larger number."""
    sequence: int
    """Batches of a life are numbered from 0, without a gap."""
    time_s: float
    """When it was told, for people; seconds since 1970."""
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a group has, after a batch of its events."""

    life: int
    sequence: int
    """The last batch that it contains; `NOTHING_YET` before the first."""
    held: Mapping[Tier, tuple[bytes, ...]]
    """The keys of the pages on each tier, each after the one that it continues."""


class KVEventPublisher:
    """Folds notices into events, and keeps what readers need that have missed some.

    It has to see every notice of a replica that names pages (`ReplicaConfig.names_pages`), from the
    first on. One thread folds; any may ask for events and snapshots meanwhile.
    """

    def __init__(self, *, life: int, replay_pages_max: int = REPLAY_PAGES_MAX) -> None:
        """`life` is larger than that of any earlier publisher of this group."""
        self.life = life
        self._replay_pages_max = replay_pages_max
        self._lock = Lock()
        self._next = 0
        self._kept: deque[EventBatch] = deque()
        self._kept_pages = 0
        self._held: dict[Tier, dict[bytes, bytes | None]] = {tier: {} for tier in TIERS}
        """By tier: the key of each page, and that of the page before it."""
        self._more: Counter[tuple[Tier, bytes]] = Counter()
        """How many pages of a key a tier has beyond the first: a reset to the version of the weights
        that was there before gives new pages the keys of those that requests still hold."""

    @property
    def last_sequence(self) -> int:
        """The number of the last batch; `NOTHING_YET` if there was none."""
        return self._next - 1

    def fold(self, notices: Iterable[Notice], time_s: float = 0.0) -> EventBatch | None:
        """Return what notices add up to as the next batch; None if they change nothing that is told."""
        with self._lock:
            events: list[Event] = []
            cleared = False
            for notice in notices:
                if isinstance(notice, Reset):
                    cleared = True
                elif isinstance(notice, Stored | Removed):
                    events += self._folded(notice)
            if cleared:
                # What has left by the reset itself is not named one by one.
                events = [AllBlocksCleared(), *self._all_held()]
            if not events:
                return None
            batch = EventBatch(
                life=self.life, sequence=self._next, time_s=time_s, events=tuple(events)
            )
            self._next += 1
            self._keep(batch)
            return batch

    def since(self, sequence: int) -> tuple[EventBatch, ...] | None:
        """Return all batches after number `sequence`; None if only a snapshot helps."""
        with self._lock:
            if sequence >= self._next:
                # Whoever has more than there is has it of another life.
                return None
            missing = self._next - 1 - sequence
            if missing > len(self._kept):
                return None
            return tuple(self._kept)[len(self._kept) - missing :]

    def snapshot(self) -> Snapshot:
        """Return all that the group has now."""
        with self._lock:
            held = {tier: tuple(pages) for tier, pages in self._held.items()}
            return Snapshot(life=self.life, sequence=self._next - 1, held=held)

    def _folded(self, notice: Stored | Removed) -> Iterator[Event]:
        if notice.tier not in self._held or notice.pool != KV_POOL:
            return
        if len(notice.keys) != notice.pages:
            raise ConfigError(
                "KV events need notices that name pages; set names_pages in the replica's settings"
            )
        if isinstance(notice, Stored):
            yield from self._stored(notice)
        else:
            gone = tuple(key for key in notice.keys if self._is_gone(notice.tier, key))
            if gone:
                yield BlockRemoved(notice.tier, gone)

    def _stored(self, notice: Stored) -> Iterator[BlockStored]:
        held, keys = self._held[notice.tier], notice.keys
        befores = [notice.after if self._has(notice.after) else None, *keys[:-1]]
        new = [at for at, key in enumerate(keys) if key not in held]
        held.update((keys[at], befores[at]) for at in new)
        if len(new) == len(keys):
            yield BlockStored(notice.tier, keys, befores[0], notice.tokens)
            return
        self._more.update((notice.tier, key) for key in {*keys} - {keys[at] for at in new})
        page_bytes = len(notice.tokens) // len(keys)
        for at in new:
            tokens = notice.tokens[at * page_bytes : (at + 1) * page_bytes]
            yield BlockStored(notice.tier, (keys[at],), befores[at], tokens)

    def _is_gone(self, tier: Tier, key: bytes) -> bool:
        """Take note that a page has left a tier, and say whether no other has its key there."""
        if (tier, key) in self._more:
            self._more[tier, key] -= 1
            if not self._more[tier, key]:
                del self._more[tier, key]
            return False
        if key not in self._held[tier]:
            return False
        del self._held[tier][key]
        return True

    def _has(self, key: bytes) -> bool:
        return any(key in pages for pages in self._held.values())

    def _all_held(self) -> Iterator[BlockStored]:
        """Yield all that is held, page by page: of before a reset that is little, and soon gone."""
        for tier, pages in self._held.items():
            for key, before in pages.items():
                yield BlockStored(tier, (key,), before)

    def _keep(self, batch: EventBatch) -> None:
        self._kept.append(batch)
        self._kept_pages += _size(batch)
        while self._kept_pages > self._replay_pages_max and len(self._kept) > 1:
            self._kept_pages -= _size(self._kept.popleft())


def _size(batch: EventBatch) -> int:
    """Return how many pages a batch names; each event counts as one more."""
    pages = (len(each.keys) for each in batch.events if not isinstance(each, AllBlocksCleared))
    return len(batch.events) + sum(pages)
