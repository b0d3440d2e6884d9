"""The replica: one rank's copy of the cache's state, the same on every rank.

It changes in two ways only: by a command that the engine issues identically on every rank, and by a
verdict that all ranks received. It reads no clock, thread, file or collective, and knows neither ballot
nor executor. A command returns its answer and the `Effects` that follow; a verdict returns effects.
What only reads is a property, or says so, and leaves the digest as it was.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

from ...coordinator.operation import Kind, Queue
from ...coordinator.seats import SeatTable
from ...coordinator.verdict import Found, Verdict, Watermark
from ...errors import UsageError
from ..protocol.answers import Admission, Dropped, Wait
from ..protocol.config import NamespaceLimit
from ..protocol.effects import Effects
from ..protocol.orders import KV_POOL
from ..protocol.replica_config import ReplicaConfig
from .attaching import StoreState
from .clearing import Clearing
from .core.basis import Basis
from .core.misses import Misses
from .core.pages import PageRun
from .device.device import Device, Follows
from .device.lent_device import LentDevice
from .device.owned import OwnedDevice
from .hearing import Hearing
from .operations.kinds import Copy, Operation, Prefetch
from .operations.quarantine import KEEPS_TOO_MUCH, Quarantine
from .operations.requests import LentRequest, LoadState, OwnedRequest, Request, require_name
from .parts import SOUND, Parts
from .tree.backlog import Undone
from .tree.matching import Match, match

_LENT = "the engine owns the device's pages, and names those it lends"
_OWNED = "the cache owns the device's pages; an engine lends none"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def command(
    method: Callable[Concatenate["Replica", _P], _T],
) -> Callable[Concatenate["Replica", _P], tuple[_T, Effects]]:
    """Let a method of the replica return its effects beside its answer."""

    def with_effects(self: "Replica", /, *args: _P.args, **kwargs: _P.kwargs) -> tuple[_T, Effects]:
        answer = method(self, *args, **kwargs)
        self.prefixes.mend()
        return answer, self.outbox.collect()

    # Without the type that it gives, which hides that the first argument is the replica.
    update_wrapper(with_effects, method)
    return with_effects


class Replica:
    """The state machine, put together from its parts. Each part is handed what it may touch.

    The parts are public for checkers, tests and reports, which only read them.
    """

    def __init__(self, config: ReplicaConfig, parts: Parts = SOUND) -> None:
        self.config = config
        self.lost: str | None = None
        """Why no rank can go on, in the same words on all of them; None while they can."""
        pages = config.host_pages + config.device_pages + config.engine_pages
        basis = Basis(config, misses=Misses(pages))
        self.clock, self.journal, self.outbox = basis.clock, basis.journal, basis.outbox
        self.misses = basis.misses
        journal, outbox = basis.journal, basis.outbox
        self.prefixes = prefixes = parts.prefixes(basis, parts.residence)
        self.agenda = agenda = parts.agenda(basis, prefixes.residence)
        owned = bool(config.device_pages)
        asks = OwnedRequest if owned else LentRequest
        self.requests = requests = parts.requests(prefixes, journal, asks)
        self.store = store = parts.store(basis)
        self.persisting = persisting = parts.persisting(basis, prefixes, agenda, store, requests)
        self.backing_up = backing_up = parts.backing_up(
            basis, prefixes, agenda, requests, persisting
        )
        self.retrying = parts.retrying(basis, prefixes, agenda, backing_up, persisting)
        self.saving = saving = parts.saving(config, prefixes, agenda, requests, backing_up)
        self.prefetching = prefetching = parts.prefetching(basis, prefixes, agenda, store, requests)
        self.loading_back = loading_back = parts.loading_back(prefixes, agenda, requests, journal)
        self.device: Device = (parts.owned if owned else parts.lent)(
            basis, prefixes, agenda, requests, loading_back, backing_up, saving
        )
        self.quarantine = quarantine = Quarantine(config, prefixes, agenda, store)
        self.pinning = pinning = parts.pinning(basis, prefixes, requests, backing_up)
        self.clearing = Clearing(basis, prefixes, requests, prefetching, pinning, store)
        self.hearing = Hearing(journal, outbox)
        self.attaching = parts.attaching(basis, agenda, store, prefetching, persisting, quarantine)
        self.serving = parts.serving(basis, prefixes, agenda, requests, backing_up, persisting)
        self._follows: dict[Kind, Follows] = {
            Kind.PREFETCH: Follows(prefetching.quiet),
            Kind.BACKUP: Follows(agenda.finish, backing_up.settle, backing_up.failed),
            Kind.PERSIST: Follows(persisting.quiet, persisting.ended, persisting.failed),
            Kind.SERVE: Follows(self.serving.quiet),
            **self.device.follows(),
        }

    @property
    def digest(self) -> int:
        """The rolling digest of everything that has changed this replica; 63 bits."""
        return self.journal.digest

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, except what is quarantined until its store falls quiet."""
        return not self.agenda.working.total() and not self.retrying.is_due

    @property
    def store_state(self) -> StoreState:
        """How far the group is with its store."""
        return self.attaching.store_state

    @property
    def leaving(self) -> list[str]:
        """The released requests whose lent pages are not free yet, and perhaps never will be."""
        return list(self._lent.leaving)

    @property
    def waits_for_frees(self) -> bool:
        """Whether lent pages of released requests are not free yet, and will be by a verdict."""
        return self._lent.waits

    def seats(self) -> SeatTable:
        """Return the table of the seats of the next ballot; the same one while nothing changes."""
        return self.agenda.seats()

    def knows(self, name: str) -> bool:
        """Say whether a request is known. Reads only."""
        return name in self.requests

    def match(self, namespace: str, tokens: bytes | memoryview) -> Match:
        """Return how much of `tokens` is cached. Reads only."""
        return match(self.prefixes, self.requests.place(namespace), tokens)

    def last_key(self, namespace: str, tokens: bytes) -> bytes:
        """Return the key of the last whole page of `tokens`. Reads only."""
        return self.prefixes.last_key(self.requests.place(namespace), tokens)

    def prefetch_done(self, name: str) -> bool:
        """Say whether the engine need not wait for the request's prefetch. Reads only."""
        request = self.requests.get(name)
        if request is None or request.prefetch is None:
            return True
        return not self.config.stop_policy.engine_waits

    def load_state(self, name: str) -> LoadState:
        """Say whether the pages of an admitted request are there. Reads only."""
        return self.device.load_state(self.requests.known(name))

    def page_table(self, name: str, pool: str = KV_POOL) -> PageRun:
        """Return the request's device pages of one pool in token order. Reads only."""
        return self._owned.page_table(self._owned_request(name), pool)

    def awaits_room(self, name: str) -> bool:
        """Say whether not all could be copied that a request has lent last. Reads only."""
        require_name("request", name)
        return name in self.prefixes.residence.not_on_host.awaited

    def backup_is_due(self, name: str) -> bool:
        """Say whether a backup that awaits room may find some by now. Reads only."""
        require_name("request", name)
        return self.backing_up.lender_is_due(name)

    @property
    def unwritten(self) -> dict[Undone, int]:
        """How many pages are not yet where the write policy wants them, by cause. Reads only."""
        not_on_host, not_stored = self.prefixes.residence.backlogs
        return dict(not_on_host.pages + not_stored.pages)

    @property
    def left_unwritten(self) -> dict[Undone, int]:
        """How many pages have left memory before they were written, by cause. Reads only."""
        not_on_host, not_stored = self.prefixes.residence.backlogs
        return dict(not_on_host.lost + not_stored.lost)

    def touching(self, name: str | None, *, awaited: bool = False) -> tuple[int, ...]:
        """Return the copies that touch pages lent by a request, or by any. Reads only."""
        return self._lent.touching(name, awaited=awaited)

    @command
    def witness(self, *facts: object) -> None:
        """Let the digest cover facts of the engine that must be the same on every rank."""
        self.journal.record("engine", *facts)

    @command
    def agree_on_requests(self, number: int) -> None:
        """Know that every rank has the requests up to a number: one replica decides for all of them."""
        self.hearing.reach(number)

    @command
    def hear(self, number: int, content: bytes | None) -> None:
        """Let a message that every rank has become a command: its bytes are in the digest as a hash."""
        self.hearing.hear(number, content)

    @command
    def prefetch(self, name: str, namespace: str, tokens: bytes, source: str = "") -> bool:
        """Begin to bring what storage may have of `tokens` beyond what is on device and host.

        With a `source` it is another group that may have it.
        """
        request = self._enter(name, namespace)
        if request.admitted:
            raise UsageError(f"request {name!r} is admitted already; prefetch before load back")
        self.requests.witness_tokens("prefetch", name, tokens)
        return self.prefetching.begin(request, tokens, source)

    @command
    def load_back(
        self, name: str, namespace: str, tokens: bytes, reserve_tokens: int, priority: int = 0
    ) -> Admission | Wait:
        """Admit a request; ends its prefetch with what has landed so far."""
        owned, requests = self._owned, self.requests
        owned.require_possible(name, requests.place(namespace), tokens, reserve_tokens)
        request = requests.enter(name, namespace)
        assert isinstance(request, OwnedRequest)
        if request.admitted:
            raise UsageError(f"request {request.id!r} is admitted already; release it first")
        requests.witness_tokens("load back", name, tokens)
        self.prefetching.stop(request)
        return owned.admit(request, tokens, reserve_tokens, priority)

    @command
    def extend(self, name: str, total_tokens: int) -> bool:
        """Reserve pages until the request has room for `total_tokens` tokens; False if it cannot."""
        return self._owned.extend(self._owned_request(name), total_tokens)

    @command
    def insert(self, name: str, tokens: bytes, *, final: bool) -> int:
        """Publish what a request has computed; return how many of its tokens are shared now."""
        return self._owned.insert(self._owned_request(name), tokens, final=final)

    @command
    def retract(self, name: str, tokens: bytes) -> bool:
        """Move a request off the device; False if host memory has no room for it."""
        return self._owned.retract(self._owned_request(name), tokens)

    @command
    def resume(self, name: str, reserve_tokens: int) -> Admission | Wait:
        """Bring a retracted request back."""
        return self._owned.resume(self._owned_request(name), reserve_tokens)

    @command
    def release(self, name: str) -> bool:
        """Forget a request and give back what it holds; its prefetch ends with what has landed.

        Returns whether no copy on any rank touches device pages that it has lent. If not, a later
        verdict's effects name it as freed.
        """
        request = self.requests.known(name)
        self.prefetching.stop(request)
        self.serving.stop(request)
        return self.device.release(request)

    @command
    def serve(self, name: str, tokens: bytes, ttl_ms: int) -> int:
        """Let other groups read what a request has computed; return how much of it they can by now."""
        return self.serving.serve(self.requests.known(name), tokens, ttl_ms)

    @command
    def pin(self, name: str, namespace: str, tokens: bytes, ttl_ms: int) -> int:
        """Keep what is cached of `tokens` until a time; return how many tokens those are."""
        return self.pinning.pin(name, self.requests.place(namespace), tokens, ttl_ms)

    @command
    def unpin(self, name: str) -> bool:
        """Let go of what a pin keeps; False if there is no pin of that name, or its time is over."""
        return self.pinning.unpin(name)

    @command
    def hit(self, name: str, namespace: str, tokens: bytes, device_tokens: int) -> int:
        """Return how many tokens host memory can bring beyond `device_tokens`."""
        lent = self._lent
        request = self._enter(name, namespace)
        assert isinstance(request, LentRequest)
        # What the engine has itself must be the same on every rank, or their batches differ.
        self.journal.record("hit", name, device_tokens)
        return lent.hit(request, tokens, device_tokens)

    @command
    def admit(self, name: str, namespace: str, tokens: bytes, device_tokens: int) -> None:
        """Count what a request has of `tokens` on the device, and what it lacks: it computes now."""
        lent, request = self._lent, self._enter(name, namespace)
        assert isinstance(request, LentRequest)
        lent.admit(request, tokens, device_tokens)

    @command
    def load(self, name: str, tokens: bytes, start_tokens: int, runs: Sequence[PageRun]) -> None:
        """Copy pages of `tokens` to device pages that the engine lends."""
        request = self._lent_request(name)
        # A call that is refused must change nothing, so it is refused before the prefetch ends.
        self._lent.require_loadable(request, tokens, start_tokens, runs)
        self.prefetching.stop(request)
        self._lent.load(request, tokens, start_tokens, runs)

    @command
    def back_up(self, name: str, namespace: str, tokens: bytes, runs: Sequence[PageRun]) -> int:
        """Copy what of `tokens` is not on the host from device pages that the engine lends."""
        lent = self._lent
        lent.require_lent(name, tokens, runs)
        request = self._enter(name, namespace)
        assert isinstance(request, LentRequest)
        return lent.back_up(request, tokens, runs)

    @command
    def fence(self, name: str) -> None:
        """Let the engine overwrite the pages that it lends for a request."""
        request = self._lent_request(name)
        self._lent.require_no_copy(request)
        if not self.requests.is_current(request.place):
            # It leaves the place from before a reset, to which its prefetch still brings pages.
            self.prefetching.stop(request)
        self._lent.fence(request)

    @command
    def retract_lent(self, name: str, tokens: bytes, runs: Sequence[PageRun]) -> bool:
        """Copy all that a request has from device pages that the engine lends; False for no room."""
        return self._lent.retract(self._lent_request(name), tokens, runs)

    @command
    def resume_lent(self, name: str, runs: Sequence[PageRun], device_tokens: int) -> Wait | None:
        """Bring a retracted request back to device pages that the engine lends."""
        request = self._lent_request(name)
        answer = self._lent.resume(request, runs, device_tokens)
        if answer is Wait.LOST:
            # It begins anew, perhaps in another place than that which its prefetch brings pages to.
            self.prefetching.stop(request)
        return answer

    @command
    def write_out(self) -> None:
        """Try at once to back up and persist what was put off."""
        self.journal.record("write out")
        self.retrying.now()

    @command
    def reset(self, weights_version: str | None = None) -> None:
        """Hide all that is cached now from every request that is not admitted yet."""
        self.clearing.reset(weights_version)

    @command
    def drop(self, namespace: str | None) -> Dropped:
        """Evict what nobody holds of a namespace, or of all."""
        return self.clearing.drop(namespace)

    @command
    def limit(self, limit: NamespaceLimit) -> None:
        """Give a namespace another limit."""
        self.clearing.limit(limit)

    def apply(self, verdict: Verdict) -> Effects:
        """Apply what all ranks concluded: prefetches by id, then each queue in its order."""
        clock = self.clock
        clock.agreed_ms = max(clock.agreed_ms, verdict.time_ms)
        self.store.forget_old_misses()
        self.misses.settle()
        for each in verdict.seats:
            if isinstance(each, Found):
                self.prefetching.found(each)
            else:
                self.prefetching.arrived(each)
        for watermark in verdict.watermarks:
            self._settle(watermark)
        self.agenda.let_others_pass()
        self.attaching.consider(verdict.proposed)
        self.hearing.reach(verdict.requests)
        self.prefetching.expire_waiting()
        self.pinning.look_after()
        self.serving.look_after()
        self.prefixes.residence.enforce_limits(clock.agreed_ms)
        self.retrying.after_verdict()
        self.device.after_verdict()
        self.prefixes.mend()
        return self.outbox.collect()

    @property
    def _owned(self) -> OwnedDevice:
        if not isinstance(self.device, OwnedDevice):
            raise UsageError(_LENT)
        return self.device

    @property
    def _lent(self) -> LentDevice:
        if not isinstance(self.device, LentDevice):
            raise UsageError(_OWNED)
        return self.device

    def _owned_request(self, name: str) -> OwnedRequest:
        request = self.requests.known(name)
        if not isinstance(request, OwnedRequest):
            raise UsageError(_LENT)
        return request

    def _lent_request(self, name: str) -> LentRequest:
        request = self.requests.known(name)
        if not isinstance(request, LentRequest):
            raise UsageError(_OWNED)
        return request

    def _enter(self, name: str, namespace: str) -> Request:
        if isinstance(self.device, LentDevice) and self.device.is_leaving(name):
            raise UsageError(f"request {name!r} still lends pages; wait until it is freed")
        return self.requests.enter(name, namespace)

    def _settle(self, watermark: Watermark) -> None:
        queue = watermark.queue
        for operation, well in self.agenda.settled(watermark):
            follows = self._follows[operation.kind]
            if queue is Queue.QUARANTINE or (well and queue is Queue.QUIESCE):
                follows.quiet(operation)
            elif queue is Queue.QUIESCE:
                self._quarantine(operation, watermark.failed_rank)
            elif well:
                follows.ended(operation)
            else:
                follows.failed(operation)

    def _quarantine(self, operation: Operation, rank: int | None) -> None:
        """Quarantine an operation that did not fall quiet, and see whether that is too much."""
        self.agenda.quarantine(operation, rank)
        if isinstance(operation, Copy):
            self.device.quarantined(operation)
        elif isinstance(operation, Prefetch):
            self.prefetching.quarantined(operation)
        if operation.is_for_store:
            if self.quarantine.store_keeps_too_much():
                # A store that does not fall quiet would take the host pool page by page.
                self.attaching.detach(KEEPS_TOO_MUCH)
        elif excess := self.quarantine.others_keep_too_much():
            what = f"{operation.kind.name.lower().replace('_', ' ')} {operation.id}"
            self.lost = f"{excess}; the last is {what}, which hangs on rank {rank}"
            self.outbox.lost = self.lost
        self.prefetching.begin_waiting()
