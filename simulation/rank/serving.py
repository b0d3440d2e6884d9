"""Serving in the simulation: readers of other groups, who come and go at moments of their own.

Each takes a while over a page, and looks at what it gets. No reader begins after the order is
cancelled, and quiet is reported when the last one has left.
"""

from functools import partial

from ...ranks.orders import Serve
from ...ranks.replica.tree.node import HOST
from .conditions import Conditions, OrderWork, Page
from .memory import SimulatedStore, SymbolicMemory

READERS = 3
"""How many reads of a page are drawn at most."""


class Serving:
    """The page server of one simulated rank."""

    def __init__(
        self, conditions: Conditions, memory: SymbolicMemory, store: SimulatedStore
    ) -> None:
        """What the keys of pages mean is known to the `store`."""
        self._conditions = conditions
        self._memory = memory
        self._store = store

    def serve(self, order: Serve, work: OrderWork) -> None:
        """Let others read the pages of an order."""
        conditions = self._conditions
        for transfer in order.transfers:
            for key, slot in zip(transfer.keys, transfer.pages, strict=True):
                page = Page(len(work.queue), transfer.pool, key, slot)
                work.queue.append(page)
                self._memory.named(HOST, page.pool).claim_to_read(slot, work.operation)
                for _ in range(conditions.random.randrange(READERS + 1)):
                    delay_us = conditions.duration_us(work, 200_000)
                    conditions.plan(delay_us, partial(self._begin, work, page))

    def _begin(self, work: OrderWork, page: Page) -> None:
        if work.cancelled:
            return
        slots = self._memory.named(HOST, page.pool)
        slots.claim_to_read(page.page, work.operation)
        work.touching += 1
        delay_us = self._conditions.duration_us(work, 30_000)
        self._conditions.plan(delay_us, partial(self._end, work, page))

    def _end(self, work: OrderWork, page: Page) -> None:
        slots = self._memory.named(HOST, page.pool)
        wrong = self._store.compare(page.pool, page.key, slots.content[page.page])
        if wrong is not None:
            self._conditions.find(wrong)
        slots.finish_reading(page.page)
        work.touching -= 1
        self._conditions.maybe_quiet(work)
