"""Simulated memory and storage of one rank: content numbers in place of bytes, with access checks."""

from collections.abc import Mapping

from ...ranks.protocol.orders import KV_POOL
from ...ranks.replica.tree.node import DEVICE, HOST
from ..world.contents import EMPTY, SHARDS, describe
from ..world.violated import Record


class Slots:
    """The page slots of one pool on one tier of one rank.

    An order claims its slots from its issue until the end of its I/O. Several orders may read a slot;
    an order that writes a slot must be the only one.
    """

    def __init__(
        self, tier: str, pages: int, record: Record, *, pool: str = KV_POOL, rank: int = 0
    ) -> None:
        self.content = [EMPTY] * pages
        """Content number of each slot; see `world/contents.py`."""
        self.shard = rank * SHARDS
        """The rank's offset: a prefix's content number plus this offset is the number of the rank's
        shard."""
        self._tier, self._pool, self.rank = tier, pool, rank
        self.writer: list[int | None] = [None] * pages
        """By slot: the operation that writes, or may still write, the slot; None if there is none."""
        self._readers = [0] * pages
        self._record = record

    def slot(self, page: int) -> str:
        """Return the name of a page slot for use in a violation message."""
        return f"{self._tier} {self._pool} page {page}"

    def wrong_page(self, page: int, request: str, wanted: int) -> str:
        """Return a violation message: a page in use does not hold its request's prefix."""
        held = f"holds {describe(self.content[page])} instead of {describe(wanted)}"
        return f"rank {self.rank}: {self.slot(page)} of request {request} {held}"

    def touched_although(self, page: int, why: str) -> str:
        """Return a violation message: a transfer accesses a page that no transfer may access."""
        return f"rank {self.rank}: a transfer touches {self.slot(page)}, although {why}"

    def nothing_to_copy(self, page: int, who: str) -> str:
        """Return a violation message: an operation copies a page that holds no prefix's content."""
        content = describe(self.content[page])
        return f"rank {self.rank}: {who} copies {self.slot(page)}, which holds {content}"

    def claim_to_read(self, page: int, operation: int) -> None:
        """Record that `operation` will read the slot; record a violation if another one writes it."""
        if not self._exists(page, f"operation {operation}"):
            return
        if self.writer[page] is not None:
            self._record_two(f"operation {operation} reads", page)
        self._readers[page] += 1

    def claim_to_write(self, page: int, operation: int) -> None:
        """Record that `operation` will write the slot; record a violation if others access it."""
        if not self._exists(page, f"operation {operation}"):
            return
        if self.touched(page):
            self._record_two(f"operation {operation} writes", page)
        self.writer[page] = operation

    def finish_reading(self, page: int) -> None:
        """Drop one operation's claim to read a slot."""
        self._readers[page] -= 1

    def finish_writing(self, page: int, operation: int) -> None:
        """Drop the claim of `operation` to write a slot."""
        if self.writer[page] == operation:
            self.writer[page] = None

    def compute(self, page: int, before: int, after: int, request: str) -> None:
        """Change a page's content from `before` (EMPTY: any) to `after`, as the model does.

        Both arguments are content numbers without a shard; this rank's shard is added here.
        """
        if self.touched(page):
            self._record(self.touched_although(page, f"request {request} computes into it"))
        wanted = before + self.shard
        if before != EMPTY and self.content[page] != wanted:
            self._record(self.wrong_page(page, request, wanted))
        self.content[page] = after + self.shard

    def fork(self, source: int, destination: int) -> None:
        """Copy one slot's content to another slot without delay; later work sees the copy."""
        if not (self._exists(source, "a fork") and self._exists(destination, "a fork")):
            return
        content = self.content[source]
        if content <= EMPTY or self.writer[source] is not None:
            self._record(self.nothing_to_copy(source, "a fork"))
        if self.touched(destination):
            self._record(self.touched_although(destination, "a state is copied into it"))
        self.content[destination] = content

    def touched(self, page: int) -> bool:
        """Return whether some operation has claimed the slot."""
        return self.writer[page] is not None or self._readers[page] > 0

    def claims(self) -> list[int]:
        """Return all slots that operations have claimed."""
        return [page for page in range(len(self.content)) if self.touched(page)]

    def _exists(self, page: int, who: str) -> bool:
        if 0 <= page < len(self.content):
            return True
        names = f"names {self.slot(page)}, which has {len(self.content)} pages"
        self._record(f"rank {self.rank}: {who} {names}")
        return False

    def _record_two(self, transfer: str, page: int) -> None:
        """Record a violation: two operations access one page, and at least one of them writes."""
        writer = self.writer[page]
        other = "others still read" if writer is None else f"operation {writer} still writes"
        self._record(f"rank {self.rank}: {transfer} {self.slot(page)} while {other} it")


class SymbolicMemory:
    """All page slots of one rank, by tier and pool."""

    def __init__(self, pools: Mapping[str, tuple[int, int]], record: Record, rank: int = 0) -> None:
        """Create the slots; `pools` has the number of device and of host pages by pool name."""
        self.tiers: tuple[dict[str, Slots], dict[str, Slots]] = ({}, {})
        """Slots by tier (`DEVICE`, `HOST`) and pool."""
        for pool, sizes in pools.items():
            for tier, name in ((DEVICE, "device"), (HOST, "host")):
                self.tiers[tier][pool] = Slots(name, sizes[tier], record, pool=pool, rank=rank)
        self._record = record
        self._rank = rank

    @property
    def device(self) -> dict[str, Slots]:
        return self.tiers[DEVICE]

    @property
    def host(self) -> dict[str, Slots]:
        return self.tiers[HOST]

    def named(self, tier: int, pool: str) -> Slots:
        """Return the slots of an order's pool; record a violation if the pool is unknown."""
        if pool not in self.tiers[tier]:
            wrong = f"names the pool {pool!r}, which is unknown"
            self._record(f"rank {self._rank}: an order {wrong}")
            pool = KV_POOL
        return self.tiers[tier][pool]


class SimulatedStore:
    """One rank's objects in a simulated store. The objects outlive the group's processes.

    All ranks share `meanings`, because a pool's page key means the same token prefix on every rank and
    at all times. Each rank's object under a key holds that rank's shard.
    """

    def __init__(self, meanings: dict[tuple[str, bytes], int], rank: int = 0) -> None:
        self._objects: dict[tuple[str, bytes], int] = {}
        self.accepted: set[tuple[str, bytes]] = set()
        """(pool, key) of the objects that this rank need not write.

        Either this rank has written the object, which the store may have lost since, or the page came
        from another group, which writes the object itself.
        """
        self._meanings = meanings
        self._rank = rank

    def has(self, pool: str, key: bytes) -> bool:
        return (pool, key) in self._objects

    def read(self, pool: str, key: bytes) -> int | None:
        return self._objects.get((pool, key))

    def write(self, pool: str, key: bytes, content: int) -> str | None:
        """Write an object unless it exists; return a violation message if its content is wrong."""
        wrong = self.compare(pool, key, content)
        self._objects.setdefault((pool, key), content)
        self.accepted.add((pool, key))
        return wrong

    def compare(self, pool: str, key: bytes, content: int) -> str | None:
        """Return a violation message if this content does not belong under this page key."""
        under = "a page key"
        if content > EMPTY:
            meaning = self._meanings.setdefault((pool, key), content % SHARDS)
            meaning += self._rank * SHARDS
            if content == meaning:
                return None
            under = f"the key of {describe(meaning)}"
        return f"rank {self._rank}: a persist stores {describe(content)} under {under}"

    def remove(self, pool: str, key: bytes) -> None:
        self._objects.pop((pool, key), None)

    def empty(self) -> None:
        self._objects.clear()
        self.accepted.clear()

    def lose(self, index: int) -> bool:
        """Remove the object at position `index` modulo the object count; False if there is none."""
        if not self._objects:
            return False
        names = list(self._objects)
        del self._objects[names[index % len(names)]]
        return True

    def __len__(self) -> int:
        return len(self._objects)
