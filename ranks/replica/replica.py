"""The replica: one rank's copy of the cache's state, the same on every rank.

It changes in two ways only: by a command that the engine issues identically on every rank, and by a
verdict that all ranks received. It reads no clock, thread, file or collective. What it wants done it
leaves in `orders`; what this rank has seen of it, it never asks.
"""

from collections.abc import Callable
from typing import TypeVar

from ...coordinator.operation import Kind, Outcome, Phase, Queue
from ...coordinator.seats import SeatTable
from ...coordinator.verdict import Found, Verdict, Watermark
from ...errors import InternalError, UsageError
from ..orders import KV_POOL, Order
from .attaching import Attaching
from .backing_up import BackingUp
from .check import check
from .digest import state_digest
from .loading_back import LoadingBack
from .matching import Match, match
from .offloading import Offloading
from .operations import Copy, Operation, Persist, Prefetch
from .pages import PageRun
from .pinning import Pinning
from .prefetching import Prefetching
from .quarantine import copies_keep_too_much, stores_keep_too_much
from .request import Request, Shortfall
from .retracting import Retracting
from .serving import Admission, LoadState, Serving, Wait
from .settings import ReplicaConfig
from .state import Decision, Expectations, ReplicaState
from .too_long import require_possible, require_resumable

_OperationT = TypeVar("_OperationT", bound=Operation)


class Replica:
    """The state machine. Every method but the reading ones is a command or applies a verdict."""

    def __init__(self, config: ReplicaConfig, expectations: Expectations) -> None:
        self.state = ReplicaState(config, expectations)
        self.prefetching = Prefetching(self.state)
        self.backing_up = BackingUp(self.state)
        self.loading_back = LoadingBack(self.state)
        self.serving = Serving(self.state, self.loading_back, self.backing_up)
        self.retracting = Retracting(self.state, self.serving, self.loading_back, self.backing_up)
        self.pinning = Pinning(self.state, self.backing_up)
        self.offloading = Offloading(self.state, self.loading_back, self.backing_up)
        self.attaching = Attaching(self.state, self.prefetching, self.backing_up)
        self._ended: dict[Queue, Callable[[Operation], None]] = {
            Queue.BACKUP: self._backed_up,
            Queue.LOAD_BACK: self._loaded,
            Queue.PERSIST: self._persisted,
            Queue.QUIESCE: self._quiet,
            Queue.QUARANTINE: self._quiet,
        }
        """What follows where an operation of a queue has ended on every rank."""

    @property
    def digest(self) -> int:
        """The rolling digest of everything that has changed this replica; 63 bits."""
        return self.state.journal.digest

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, except what is quarantined until its store falls quiet."""
        return not self.state.operations.working.total()

    @property
    def lost(self) -> str | None:
        """Why no rank can go on, in the same words on all of them; None while they can."""
        return self.state.lost

    def seats(self) -> SeatTable:
        """Return what the seats of the next ballot mean; the same table while nothing changes."""
        return self.state.seats.freeze()

    def take_orders(self) -> list[Order]:
        """Return the orders given since the last call, in order."""
        orders, self.state.orders = self.state.orders, []
        return orders

    def take_notices(self) -> list[Shortfall]:
        """Return what fell short since the last call, and on which rank."""
        notices, self.state.notices = self.state.notices, []
        return notices

    def take_decisions(self) -> list[Decision]:
        """Return how proposals have ended since the last call."""
        decisions, self.state.decisions = self.state.decisions, []
        return decisions

    def match(self, namespace: str, tokens: bytes | memoryview) -> Match:
        """Return how much of `tokens` is cached. Reads only."""
        return match(self.state, self.state.place(namespace), tokens)

    def prefetch(self, name: str, namespace: str, tokens: bytes) -> bool:
        """Begin to bring what storage may have of `tokens` beyond what is on device and host."""
        request = self._enter(name, namespace)
        if request.admitted:
            raise UsageError(f"request {name!r} is admitted already; prefetch before load back")
        self.state.witness_tokens("prefetch", name, tokens)
        return self.prefetching.begin(request, tokens)

    def prefetch_done(self, name: str) -> bool:
        """Say whether the engine need not wait for the request's prefetch. Reads only."""
        request = self.state.requests.get(name)
        waits = self.state.config.stop_policy.engine_waits
        return request is None or request.prefetch is None or not waits

    def load_back(
        self, name: str, namespace: str, tokens: bytes, reserve_tokens: int, priority: int = 0
    ) -> Admission | Wait:
        """Admit a request; ends its prefetch with what has landed so far."""
        require_possible(self.state, name, namespace, tokens, reserve_tokens)
        request = self._enter(name, namespace)
        self.serving.require_not_admitted(request)
        self.state.witness_tokens("load back", name, tokens)
        self.prefetching.stop(request)
        return self.serving.admit(request, tokens, reserve_tokens, priority)

    def load_state(self, name: str) -> LoadState:
        """Say whether the pages of an admitted request are there. Reads only."""
        return self._devices.load_state(self.state.request(name))

    def page_table(self, name: str, pool: str = KV_POOL) -> PageRun:
        """Return the request's device pages of one pool in token order. Reads only."""
        return self.serving.page_table(self.state.request(name), pool)

    def extend(self, name: str, total_tokens: int) -> bool:
        """Reserve pages until the request has room for `total_tokens` tokens; False if none is."""
        return self.serving.extend(self.state.request(name), total_tokens)

    def insert(self, name: str, tokens: bytes, *, final: bool) -> int:
        """Publish what a request has computed; return how many of its tokens are shared now."""
        return self.serving.insert(self.state.request(name), tokens, final=final)

    def retract(self, name: str, tokens: bytes) -> bool:
        """Move a request off the device; False if host memory has no room for it."""
        return self.retracting.retract(self.state.request(name), tokens)

    def resume(self, name: str, reserve_tokens: int) -> Admission | Wait:
        """Bring a retracted request back."""
        request = self.state.request(name)
        require_resumable(self.state, name, request.prefix, reserve_tokens)
        return self.retracting.resume(request, reserve_tokens)

    def release(self, name: str) -> None:
        """Forget a request and give back what it holds; its prefetch ends with what has landed."""
        request = self.state.request(name)
        self.prefetching.stop(request)
        self.serving.release(request)

    def pin(self, name: str, namespace: str, tokens: bytes, ttl_ms: int) -> int:
        """Keep what is cached of `tokens` until a time; return how many tokens those are."""
        return self.pinning.pin(name, self.state.place(namespace), tokens, ttl_ms)

    def unpin(self, name: str) -> bool:
        """Let go of what a pin keeps; False if there is no such pin, or no more."""
        return self.pinning.unpin(name)

    def hit(self, name: str, namespace: str, tokens: bytes, device_tokens: int) -> int:
        """Return how many tokens host memory can bring beyond `device_tokens`."""
        request = self._enter(name, namespace)
        # What the engine has itself must be the same on every rank, or their batches differ.
        self.state.journal.record("hit", name, device_tokens)
        self.state.witness_tokens("hit", name, tokens)
        return self.offloading.hit(request, tokens, device_tokens)

    def load(self, name: str, tokens: bytes, start_tokens: int, pages: PageRun) -> None:
        """Copy pages of `tokens` to device pages that the engine lends."""
        request = self.state.request(name)
        # A call that is refused must change nothing, so it is refused before the prefetch ends.
        self.offloading.require_loadable(request, tokens, start_tokens, pages)
        self.state.witness_tokens("load", name, tokens)
        self.prefetching.stop(request)
        self.offloading.load(request, tokens, start_tokens, pages)

    def back_up(self, name: str, namespace: str, tokens: bytes, pages: PageRun) -> int:
        """Copy what of `tokens` is not on the host from device pages that the engine lends."""
        self.offloading.require_lent(name, tokens, pages)
        return self.offloading.back_up(self._enter(name, namespace), tokens, pages)

    def fence(self, name: str) -> None:
        """Let the engine overwrite the pages that it lends for a request."""
        request = self.state.request(name)
        if request.place.generation != self.state.generation:
            # It leaves the place from before a reset, to which its prefetch still brings pages.
            self.prefetching.stop(request)
        self.offloading.fence(request)

    def leave(self, name: str) -> bool:
        """Forget a request; say whether the device pages that it lends are free on every rank."""
        request = self.state.request(name)
        self.prefetching.stop(request)
        return self.offloading.release(request)

    def touching(self, name: str | None) -> tuple[int, ...]:
        """Return the copies that touch pages lent by a request, or by any. Reads only."""
        return self.offloading.touching(name)

    def take_freed(self) -> list[str]:
        """Return the requests that have left and whose device pages have become free."""
        return self.offloading.take_freed()

    def reset(self, weights_version: str | None = None) -> None:
        """Offer nothing of what is cached now to any request that is not admitted yet."""
        for request in self.state.requests.values():
            if not request.admitted:
                self.prefetching.stop(request)
        self.pinning.drop_all()
        self.state.reset(weights_version)

    def apply(self, verdict: Verdict) -> None:
        """Apply what all ranks concluded: prefetches by id, then each queue in its order."""
        self.state.time_ms = max(self.state.time_ms, verdict.time_ms)
        self._forget_old_misses()
        for each in verdict.seats:
            if isinstance(each, Found):
                self.prefetching.found(each)
            else:
                self.prefetching.arrived(each)
        for watermark in verdict.watermarks:
            self._apply_watermark(watermark)
        self._let_others_pass()
        self.attaching.consider(verdict.proposed)
        self.prefetching.expire_waiting()
        self.pinning.look_after()
        self.state.residence.enforce_limits(self.state.time_ms)

    def check(self) -> None:
        """Raise `InvariantViolation` if an invariant of the state does not hold."""
        check(self.state, self.prefetching, self.backing_up, self.pinning)

    def state_digest(self) -> int:
        """Return a digest computed from the whole state; for checkers, since it is slow."""
        return state_digest(self.state)

    @property
    def _devices(self) -> Serving | Offloading:
        """What deals with device pages, by who owns them."""
        return self.offloading if self.state.engine_owns_device else self.serving

    def _enter(self, name: str, namespace: str) -> Request:
        request = self.state.requests.get(name)
        if request is None:
            if name in self.offloading.leaving:
                raise UsageError(f"request {name!r} still lends pages; wait until it is freed")
            return self.state.enter(name, namespace)
        if request.place.namespace != namespace:
            # A tenant's salt is nobody else's business, so neither is told.
            raise UsageError(f"request {name!r} is in another namespace than the one that is given")
        return request

    def _forget_old_misses(self) -> None:
        misses = self.state.misses
        while misses and next(iter(misses.values())) <= self.state.time_ms:
            misses.popitem(last=False)

    def _apply_watermark(self, watermark: Watermark) -> None:
        queue, first_failed = watermark.queue, watermark.first_failed
        in_flight, line = self.state.operations.in_flight, self.state.operations.queues[queue]
        ended, last = self._ended[queue], watermark.ended_through
        while line:
            ticket, number = line[0]
            failed = ticket == first_failed
            if not failed and ticket > last:
                return
            line.popleft()
            self.state.ballot.settle(queue, ticket)
            if failed:
                self._failed(queue, in_flight[number], watermark.failed_rank)
                return
            ended(in_flight[number])

    def _let_others_pass(self) -> None:
        """Move the first in quarantine behind the others, which may be quiet before it ever is."""
        line = self.state.operations.queues[Queue.QUARANTINE]
        if len(line) > 1:
            ticket, number = line.popleft()
            self.state.ballot.settle(Queue.QUARANTINE, ticket)
            self._enter_quarantine(self.state.operations.in_flight[number])

    def _enter_quarantine(self, operation: Operation) -> None:
        ticket = self.state.operations.new_ticket(Queue.QUARANTINE, operation)
        self.state.ballot.enqueue(Queue.QUARANTINE, ticket, operation.id)

    def _backed_up(self, operation: Operation) -> None:
        copy = _of_class(Copy, operation)
        if copy.request is None:
            self.backing_up.backed_up(copy)
        else:
            self.retracting.retracted(copy)

    def _loaded(self, operation: Operation) -> None:
        self._devices.loaded(_of_class(Copy, operation))

    def _persisted(self, operation: Operation) -> None:
        self.backing_up.persisted(_of_class(Persist, operation))

    def _failed(self, queue: Queue, operation: Operation, rank: int | None) -> None:
        if queue is Queue.QUIESCE:
            self._quarantine(operation, rank)
        elif isinstance(operation, Persist):
            self.backing_up.persist_failed(operation)
        elif isinstance(operation, Copy) and operation.kind is Kind.LOAD_BACK:
            self._devices.load_failed(operation)
        else:
            if isinstance(operation, Copy) and operation.request is not None:
                self.retracting.failed(operation)
            self.state.stop(operation, Outcome.FAILED)

    def _quiet(self, operation: Operation) -> None:
        if isinstance(operation, Prefetch):
            self.prefetching.quiet(operation)
            return
        if isinstance(operation, Copy):
            self.offloading.quiet(operation)
        assert operation.ending is not None
        self.state.finish(operation, operation.ending)

    def _quarantine(self, operation: Operation, rank: int | None) -> None:
        state = self.state
        state.advance(operation, Phase.QUARANTINED)
        self._enter_quarantine(operation)
        if isinstance(operation, Prefetch):
            self.prefetching.quarantined(operation)
        elif isinstance(operation, Copy) and (excess := copies_keep_too_much(state)):
            what = operation.kind.name.lower().replace("_", " ")
            state.lost = f"{excess}; the last is {what} {operation.id}, which hangs on rank {rank}"
        if not isinstance(operation, Copy) and stores_keep_too_much(state):
            # A store that does not fall quiet would take the host pool page by page.
            self.attaching.detach(keeps_too_much=True)
        self.prefetching.begin_waiting()


def _of_class(kind: type[_OperationT], operation: Operation) -> _OperationT:
    """Return an operation that stands in a queue of its class."""
    if not isinstance(operation, kind):
        raise InternalError(f"{operation.kind.name} {operation.id} stands in a queue of others")
    return operation
