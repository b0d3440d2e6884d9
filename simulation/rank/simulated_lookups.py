"""Simulated lookups of page keys: they access no page, and their answers may be wrong."""

from functools import partial

from ...coordinator.ballot import Answered, Expired
from ...ranks.executor.restorable import restorable
from ...ranks.protocol.orders import LookUp, Need
from ..world.faults import Mishap
from .conditions import Conditions, OrderWork
from .stores import PageSource


class SimulatedLookups:
    """Answers one rank's lookups of page keys in its store, or in a group that serves pages."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._faults = conditions.faults
        self._random = conditions.random

    def begin(self, order: LookUp, work: OrderWork, origin: PageSource) -> None:
        """Answer a lookup order after a delay, or let the lookup time out."""
        if self._faults.strikes(Mishap.LOOKUP_SILENT):
            self._conditions.plan(work.timeout_us, partial(self._expire_lookup, work))
            return
        delay_us = self._conditions.duration_us(work, 25_000)
        if delay_us > work.timeout_us:
            self._conditions.plan(work.timeout_us, partial(self._expire_lookup, work))
        self._conditions.plan(delay_us, partial(self._answer, work, order, origin))

    def _answer(self, work: OrderWork, order: LookUp, origin: PageSource) -> None:
        if work.cancelled and work.is_closed:
            return
        pages, beyond = restorable(order, [self._seen(need, origin) for need in order.needs])
        work.over = True
        self._conditions.say(Answered(work.operation, pages, beyond))

    def _seen(self, need: Need, origin: PageSource) -> list[bool]:
        """Return for each key whether the store or group claims to have the object."""
        seen = [bool(key) and origin.has(need.pool, key) for key in need.keys]
        absent = [index for index, key in enumerate(need.keys) if key and not seen[index]]
        present = [index for index, there in enumerate(seen) if there]
        if absent and self._faults.strikes(Mishap.LOOKUP_TOO_MANY):
            for index in self._some(absent):
                seen[index] = True
        elif present and self._faults.strikes(Mishap.LOOKUP_TOO_FEW):
            for index in self._some(present):
                seen[index] = False
        return seen

    def _some(self, indices: list[int]) -> list[int]:
        """Draw which of the keys at `indices` get a wrong answer: the first, the last, or any few."""
        count = self._random.randint(1, len(indices))
        match self._random.randrange(3):
            case 0:
                return indices[:count]
            case 1:
                return indices[-count:]
            case _:
                return self._random.sample(indices, count)

    def _expire_lookup(self, work: OrderWork) -> None:
        if not work.over:
            self._conditions.say(Expired(work.operation))
