"""Simulated page server of one rank, with readers of other groups.

A reader needs some time to read a page, and checks the page's content. No reader starts after the
serving order is cancelled. `Quiesced` is reported after the last reader has ended; slow readers are cut
off. This module draws readers at random; in a pair of groups, the consumer's ranks also read
(`simulated_peers.py`).
"""

from dataclasses import dataclass
from functools import partial

from ...ranks.protocol.orders import Serve
from ...ranks.replica.tree.node import HOST
from .conditions import Conditions, ObjectPage, OrderWork
from .memory import SimulatedStore, SymbolicMemory

READERS = 3
"""Maximum number of readers drawn for each served page."""


@dataclass(slots=True, eq=False)
class PeerRead:
    """One reader's read of a served page, until it ends."""

    server: "SimulatedPageServer"
    work: OrderWork
    page: ObjectPage
    is_cut_off: bool = False

    def end(self) -> int | None:
        """End the read; return the page's content, or None if the reader was cut off."""
        return self.server.end(self)


class SimulatedPageServer:
    """The page server of one simulated rank."""

    def __init__(
        self, conditions: Conditions, memory: SymbolicMemory, store: SimulatedStore
    ) -> None:
        """Create the server; `store` knows which content belongs under which page key."""
        self._conditions = conditions
        self._memory = memory
        self._store = store
        self._offered: dict[tuple[str, bytes], list[tuple[OrderWork, ObjectPage]]] = {}
        self._readings: list[PeerRead] = []

    def serve(self, order: Serve, work: OrderWork) -> None:
        """Offer the pages of a serving order to other groups, and draw readers of these pages."""
        conditions = self._conditions
        for transfer in order.transfers:
            for key, slot in zip(transfer.keys, transfer.pages, strict=True):
                page = ObjectPage(len(work.queue), transfer.pool, key, slot)
                work.queue.append(page)
                self._offered.setdefault((page.pool, key), []).append((work, page))
                self._memory.named(HOST, page.pool).claim_to_read(slot, work.operation)
                for _ in range(conditions.random.randrange(READERS + 1)):
                    delay_us = conditions.duration_us(work, 200_000)
                    conditions.plan(delay_us, partial(self._visit, work, page))

    def withdraw(self, work: OrderWork, cut_off_us: int) -> None:
        """Stop offering an order's pages, and cut off readers that remain after `cut_off_us`."""
        for page in work.queue:
            copies = self._offered[page.pool, page.key]
            copies.remove((work, page))
            if not copies:
                del self._offered[page.pool, page.key]
        if work.touching:
            self._conditions.plan(cut_off_us, partial(self._cut_off, work))

    def has(self, pool: str, key: bytes) -> bool:
        return not self._conditions.closed and (pool, key) in self._offered

    def begin(self, pool: str, key: bytes) -> PeerRead | None:
        """Start to read a served page; return None if no page is served under this key."""
        if not self.has(pool, key):
            return None
        return self._begin(*self._offered[pool, key][0])

    def end(self, reading: PeerRead) -> int | None:
        if reading.is_cut_off or self._conditions.closed:
            return None
        return self._release(reading)

    def _visit(self, work: OrderWork, page: ObjectPage) -> None:
        if work.cancelled:
            return
        reading = self._begin(work, page)
        delay_us = self._conditions.duration_us(work, 30_000)
        self._conditions.plan(delay_us, reading.end)

    def _begin(self, work: OrderWork, page: ObjectPage) -> PeerRead:
        self._memory.named(HOST, page.pool).claim_to_read(page.page, work.operation)
        work.touching += 1
        reading = PeerRead(self, work, page)
        self._readings.append(reading)
        return reading

    def _cut_off(self, work: OrderWork) -> None:
        for reading in [each for each in self._readings if each.work is work]:
            reading.is_cut_off = True
            self._release(reading)

    def _release(self, reading: PeerRead) -> int:
        self._readings.remove(reading)
        work, page = reading.work, reading.page
        slots = self._memory.named(HOST, page.pool)
        content = slots.content[page.page]
        wrong = self._store.compare(page.pool, page.key, content)
        if wrong is not None:
            self._conditions.find(wrong)
        slots.finish_reading(page.page)
        work.touching -= 1
        self._conditions.maybe_quiet(work)
        return content
