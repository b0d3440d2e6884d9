"""Device-host copies in virtual time; once a fence has ended, its copies read no device pages.

A copy is one unit over all its pools: it starts once and ends as a whole. While it runs, its
destination pages have torn content. A copy may fail, and it may hang.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...ranks.protocol.orders import CopyToDevice, CopyToHost, Direction
from ...ranks.replica.tree.node import DEVICE, HOST
from ..world.contents import EMPTY, GARBAGE, TORN
from ..world.faults import Mishap
from .conditions import Conditions, OrderWork
from .memory import Slots, SymbolicMemory


@dataclass(frozen=True, slots=True)
class _Pair:
    """One page to copy: its slots on the source tier and on the destination tier."""

    sources: Slots
    source: int
    destinations: Slots
    destination: int
    sealed: tuple[str, int] | None = None
    """(pool, host page) if the page has a checksum, which is verified when the page is copied back to
    the device. Only pages of retracted requests have one; None for other pages."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy in progress, kept until it accesses no memory any more."""

    work: OrderWork
    pairs: list[_Pair]
    to_device: bool
    fenced: bool = False
    """Whether a fence ended before this copy did; the engine may then overwrite the source pages."""

    def finish_reading(self) -> None:
        for pair in self.pairs:
            pair.sources.finish_reading(pair.source)

    def finish_writing(self) -> None:
        for pair in self.pairs:
            pair.destinations.finish_writing(pair.destination, self.work.operation)


class Copies:
    """The device-host copies of one rank's simulated executor."""

    def __init__(self, conditions: Conditions, memory: SymbolicMemory, page_bytes: int) -> None:
        self.moved: Counter[str] = Counter()
        self._conditions = conditions
        self._memory = memory
        self._page_bytes = page_bytes
        self._running: dict[int, _Copy] = {}
        self._held: dict[int, tuple[CopyToHost | CopyToDevice, OrderWork]] = {}
        self._seals: dict[tuple[str, int], int] = {}

    @property
    def has_held_copies(self) -> bool:
        """Whether copies are queued (`hold`) until the engine starts them."""
        return bool(self._held)

    def hold(self, order: CopyToHost | CopyToDevice, work: OrderWork) -> None:
        """Queue a copy until the engine starts it; a queued copy does not claim its pages yet."""
        self._held[work.operation] = (order, work)

    def begin_held(self, direction: Direction) -> None:
        """Start all queued copies in one direction: from the device, or to the device."""
        for order, work in list(self._held.values()):
            if order.direction is direction:
                del self._held[work.operation]
                self.begin(order, work)

    def drop(self, operation: int) -> None:
        """Report a copy as failed if it is still queued, and drop it."""
        if operation in self._held:
            _, work = self._held.pop(operation)
            self._conditions.end(work, ok=False)

    def begin(self, order: CopyToHost | CopyToDevice, work: OrderWork) -> None:
        """Claim a copy's pages, and start to copy now or slightly later."""
        to_device = isinstance(order, CopyToDevice)
        source, destination = (HOST, DEVICE) if to_device else (DEVICE, HOST)
        pairs = [
            _Pair(
                self._memory.named(source, transfer.pool),
                read,
                self._memory.named(destination, transfer.pool),
                written,
                (transfer.pool, read if to_device else written) if transfer.sealed else None,
            )
            for transfer in order.transfers
            for read, written in zip(transfer.sources, transfer.destinations, strict=True)
        ]
        copy = _Copy(work, pairs, to_device)
        self._running[work.operation] = copy
        for pair in pairs:
            pair.sources.claim_to_read(pair.source, work.operation)
            pair.destinations.claim_to_write(pair.destination, work.operation)
        work.touching = 1
        self._conditions.plan(work.timeout_us, partial(self._conditions.end, work, ok=False))
        if self._conditions.random.random() < 0.5:
            self._run(copy)
        else:
            delay_us = self._conditions.duration_us(work, 8_000)
            self._conditions.plan(delay_us, partial(self._run, copy))

    def _is_whole(self, page: tuple[str, int]) -> bool:
        pool, number = page
        return self._memory.named(HOST, pool).content[number] == self._seals.get(page)

    def writes_device(self, operation: int) -> bool:
        """Return whether a copy to the device has been started and may still write."""
        copy = self._running.get(operation)
        return copy is not None and copy.to_device

    def fence(self, operations: Sequence[int], timeout_us: int) -> None:
        """Wait until the copies of these operations end; fail those that outlast `timeout_us`.

        Afterwards the engine may overwrite the source pages of all these copies.
        """
        for number in operations:
            self.drop(number)
        reading = [self._running[number] for number in operations if number in self._running]
        # The seed decides whether the fence waits for copies or fails them at once.
        until_us = self._conditions.clock.now_us
        if reading and self._conditions.random.random() < 0.5:
            until_us += timeout_us
        while any(copy.work.touching for copy in reading):
            left_us = until_us - self._conditions.clock.now_us
            if left_us <= 0:
                break
            self._conditions.clock.advance_to_next(left_us)
        for copy in reading:
            if copy.work.touching and not copy.fenced:
                copy.fenced = True
                copy.finish_reading()
                self._conditions.end(copy.work, ok=False)

    def _run(self, copy: _Copy) -> None:
        if copy.work.cancelled or copy.fenced:
            self._over(copy)
            self._conditions.maybe_quiet(copy.work)
            return
        for pair in copy.pairs:
            pair.destinations.content[pair.destination] = TORN
        end = partial(self._ended, copy)
        if self._conditions.faults.strikes(Mishap.HUNG_COPY):
            self._conditions.plan_hung(copy.work, end)
        else:
            self._conditions.plan(self._conditions.duration_us(copy.work, 12_000), end)

    def _ended(self, copy: _Copy) -> None:
        sealed = [pair.sealed for pair in copy.pairs if pair.sealed is not None]
        spoiled = copy.to_device and not all(map(self._is_whole, sealed))
        failed = self._conditions.faults.strikes(Mishap.FAILED_COPY) or copy.fenced or spoiled
        for pair in copy.pairs:
            content = pair.sources.content[pair.source]
            if content <= EMPTY and not (copy.fenced or spoiled):
                who = f"operation {copy.work.operation}"
                self._conditions.find(pair.sources.nothing_to_copy(pair.source, who))
            pair.destinations.content[pair.destination] = GARBAGE if failed else content
            if pair.sealed is not None and not copy.to_device:
                self._seal(pair, content)
        direction = "l2_to_l1" if copy.to_device else "l1_to_l2"
        self.moved[direction] += len(copy.pairs) * self._page_bytes
        self._over(copy)
        self._conditions.end(copy.work, ok=not failed)
        self._conditions.maybe_quiet(copy.work)

    def _seal(self, pair: _Pair, content: int) -> None:
        assert pair.sealed is not None
        self._seals[pair.sealed] = content
        if self._conditions.faults.strikes(Mishap.SPOILED_SAVE):
            pair.destinations.content[pair.destination] = GARBAGE

    def _over(self, copy: _Copy) -> None:
        if not copy.fenced:
            copy.finish_reading()
        copy.finish_writing()
        copy.work.touching = 0
        del self._running[copy.work.operation]
