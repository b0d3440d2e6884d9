"""The replica: one rank's copy of the cache's state, equal on every rank.

The state changes only by a command that the engine issues identically on every rank, or by a verdict
that all ranks received. The replica reads no clock, thread, file or collective. A command returns its
answer and the resulting `Effects`; a verdict returns effects. Read-only methods never change the
digest.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

from ...coordinator.operation import OperationKind, Queue
from ...coordinator.prefetch_slots import PrefetchSlotTable
from ...coordinator.verdict import PrefetchFound, Verdict, Watermark
from ...errors import UsageError
from ..protocol.answers import Admission, Dropped, Wait
from ..protocol.config import NamespaceLimit
from ..protocol.effects import Effects
from ..protocol.orders import KV_POOL
from ..protocol.replica_config import ReplicaConfig
from .attaching import StoreState
from .clearing import Clearing
from .core.misses import Misses
from .core.pages import PageRun
from .core.replica_parts import ReplicaParts
from .device.device import Device, Follows
from .device.lent_device import LentDevice
from .device.owned import OwnedDevice
from .message_commit import MessageCommit
from .operations.kinds import Copy, Operation, Prefetch
from .operations.quarantine import KEEPS_TOO_MUCH, Quarantine
from .operations.requests import LentRequest, LoadState, OwnedRequest, Request, require_name
from .parts import SOUND, Parts
from .tree.backlog import Undone
from .tree.matching import Match, match

_LENT = "this call is for device pages of the cache; here the engine owns them"
_OWNED = "this call is for device pages lent by the engine; here the cache owns them"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def command(
    method: Callable[Concatenate["Replica", _P], _T],
) -> Callable[Concatenate["Replica", _P], tuple[_T, Effects]]:
    """Wrap a command of the replica so that it returns its answer and its effects."""

    def with_effects(self: "Replica", /, *args: _P.args, **kwargs: _P.kwargs) -> tuple[_T, Effects]:
        answer = method(self, *args, **kwargs)
        self.prefixes.mend()
        return answer, self.outbox.collect()

    # Ignore the result of `update_wrapper`, because its type would hide that the first argument is the
    # replica.
    update_wrapper(with_effects, method)
    return with_effects


class Replica:
    """The state machine, assembled from its parts. Each part gets only the parts that it may use.

    The parts are public for checkers, tests and reports, which only read them.
    """

    def __init__(self, config: ReplicaConfig, parts: Parts = SOUND) -> None:
        self.config = config
        self.lost: str | None = None
        """Why the epoch must end, as a text equal on all ranks; None while the epoch can go on."""
        pages = config.host_pages + config.device_pages + config.engine_pages
        basis = ReplicaParts(config, misses=Misses(pages))
        self.clock, self.journal, self.outbox = basis.clock, basis.journal, basis.outbox
        self.misses = basis.misses
        journal, outbox = basis.journal, basis.outbox
        self.prefixes = prefixes = parts.prefixes(basis, parts.allocator)
        self.operation_table = operation_table = parts.operation_table(basis, prefixes.allocator)
        owned = bool(config.device_pages)
        request_type = OwnedRequest if owned else LentRequest
        self.requests = requests = parts.requests(prefixes, journal, request_type)
        self.store = store = parts.store(basis)
        self.persisting = persisting = parts.persisting(
            basis, prefixes, operation_table, store, requests
        )
        self.backing_up = backing_up = parts.backing_up(
            basis, prefixes, operation_table, requests, persisting
        )
        self.retrying = parts.retrying(basis, prefixes, operation_table, backing_up, persisting)
        self.saving = saving = parts.saving(config, prefixes, operation_table, requests, backing_up)
        self.prefetching = prefetching = parts.prefetching(
            basis, prefixes, operation_table, store, requests
        )
        self.loading_back = loading_back = parts.loading_back(
            prefixes, operation_table, requests, journal
        )
        self.device: Device = (parts.owned if owned else parts.lent)(
            basis, prefixes, operation_table, requests, loading_back, backing_up, saving
        )
        self.quarantine = quarantine = Quarantine(config, prefixes, operation_table, store)
        self.pinning = pinning = parts.pinning(basis, prefixes, requests, backing_up)
        self.clearing = Clearing(basis, prefixes, requests, prefetching, pinning, store)
        self.messages = MessageCommit(journal, outbox)
        self.attaching = parts.attaching(
            basis, operation_table, store, prefetching, persisting, quarantine
        )
        self.serving = parts.serving(
            basis, prefixes, operation_table, requests, backing_up, persisting
        )
        self._follows: dict[OperationKind, Follows] = {
            OperationKind.PREFETCH: Follows(prefetching.quiet),
            OperationKind.BACKUP: Follows(
                operation_table.finish, backing_up.settle, backing_up.failed
            ),
            OperationKind.PERSIST: Follows(persisting.quiet, persisting.ended, persisting.failed),
            OperationKind.SERVE: Follows(self.serving.quiet),
            **self.device.follows(),
        }

    @property
    def digest(self) -> int:
        """The rolling digest of everything that has changed this replica; 63 bits."""
        return self.journal.digest

    @property
    def idle(self) -> bool:
        """Whether no retry is due, and only quarantined or serving operations are in flight."""
        return not self.operation_table.working.total() and not self.retrying.is_due

    @property
    def store_state(self) -> StoreState:
        """The state of the group's store."""
        return self.attaching.store_state

    @property
    def leaving(self) -> list[str]:
        """Names of released requests with copies in flight on their lent pages; some may never end."""
        return list(self._lent.leaving)

    @property
    def waits_for_frees(self) -> bool:
        """Whether lent pages of a released request will be free once copies in flight have ended."""
        return self._lent.waits

    def prefetch_slots(self) -> PrefetchSlotTable:
        """Return the prefetch slots of the next ballot; the same object while nothing changes."""
        return self.operation_table.prefetch_slots()

    def knows(self, name: str) -> bool:
        """Return whether there is a request of this name. Changes nothing."""
        return name in self.requests

    def match(self, namespace: str, tokens: bytes | memoryview) -> Match:
        """Return how much of `tokens` is cached. Changes nothing."""
        return match(self.prefixes, self.requests.place(namespace), tokens)

    def last_key(self, namespace: str, tokens: bytes) -> bytes:
        """Return the key of the last whole page of `tokens`. Changes nothing."""
        return self.prefixes.last_key(self.requests.place(namespace), tokens)

    def prefetch_done(self, name: str) -> bool:
        """Return whether the engine may proceed without waiting for a prefetch. Changes nothing."""
        request = self.requests.get(name)
        if request is None or request.prefetch is None:
            return True
        return not self.config.stop_policy.engine_waits

    def load_state(self, name: str) -> LoadState:
        """Return the state of the page copies of an admitted request. Changes nothing."""
        return self.device.load_state(self.requests.known(name))

    def page_table(self, name: str, pool: str = KV_POOL) -> PageRun:
        """Return the request's device pages of one pool in token order. Changes nothing."""
        return self._owned.page_table(self._owned_request(name), pool)

    def waits_for_host_pages(self, name: str) -> bool:
        """Return whether the last backup of a request's lent pages is incomplete. Changes nothing."""
        require_name("request", name)
        return name in self.prefixes.allocator.not_on_host.awaited

    def backup_is_due(self, name: str) -> bool:
        """Return whether a waiting backup of lent pages may find room now. Changes nothing."""
        require_name("request", name)
        return self.backing_up.engine_is_due(name)

    @property
    def unwritten(self) -> dict[Undone, int]:
        """How many pages are still to be backed up or persisted under the write policy, by cause."""
        not_on_host, not_stored = self.prefixes.allocator.backlogs
        return dict(not_on_host.pages + not_stored.pages)

    @property
    def lost_before_written(self) -> dict[Undone, int]:
        """How many pages were evicted before they were written, by cause."""
        not_on_host, not_stored = self.prefixes.allocator.backlogs
        return dict(not_on_host.lost + not_stored.lost)

    def touching(self, name: str | None, *, awaited: bool = False) -> tuple[int, ...]:
        """Return the ids of the copies in flight that touch lent pages of a request.

        If `name` is None, returns those of all requests. With `awaited`, leaves out quarantined copies,
        which may never end. Changes nothing.
        """
        return self._lent.touching(name, awaited=awaited)

    @command
    def digest_facts(self, *facts: object) -> None:
        """Add the engine's facts, which must be equal on every rank, to the digest."""
        self.journal.record("engine", *facts)

    @command
    def agree_on_requests(self, number: int) -> None:
        """Record, in one-scheduler mode, that every rank has all control requests up to `number`."""
        self.messages.reach(number)

    @command
    def commit_message(self, number: int, content: bytes | None) -> None:
        """Apply, as a command, a control request that every rank has; the digest covers its hash."""
        self.messages.commit(number, content)

    @command
    def prefetch(self, name: str, namespace: str, tokens: bytes, source: str = "") -> bool:
        """Start to read from storage the part of `tokens` that is on neither device nor host.

        With a `source`, read from that group instead. Returns whether a prefetch began.
        """
        request = self._enter(name, namespace)
        if request.admitted:
            raise UsageError(f"request {name!r} is admitted already; prefetch before load back")
        self.requests.digest_tokens("prefetch", name, tokens)
        return self.prefetching.begin(request, tokens, source)

    @command
    def load_back(
        self, name: str, namespace: str, tokens: bytes, reserve_tokens: int, priority: int = 0
    ) -> Admission | Wait:
        """Admit a request; its prefetch ends, and the pages that have landed stay cached."""
        owned, requests = self._owned, self.requests
        owned.require_possible(name, requests.place(namespace), tokens, reserve_tokens)
        request = requests.enter(name, namespace)
        assert isinstance(request, OwnedRequest)
        if request.admitted:
            raise UsageError(f"request {request.id!r} is admitted already; release it first")
        requests.digest_tokens("load back", name, tokens)
        self.prefetching.stop(request)
        return owned.admit(request, tokens, reserve_tokens, priority)

    @command
    def extend(self, name: str, total_tokens: int) -> bool:
        """Reserve pages for `total_tokens` tokens of a request; return False if too few are left."""
        return self._owned.extend(self._owned_request(name), total_tokens)

    @command
    def insert(self, name: str, tokens: bytes, *, final: bool) -> int:
        """Insert a request's computed pages into the tree; return how many tokens are in the tree."""
        return self._owned.insert(self._owned_request(name), tokens, final=final)

    @command
    def retract(self, name: str, tokens: bytes) -> bool:
        """Move a request's pages to host memory (retract); return False if host memory has no room."""
        return self._owned.retract(self._owned_request(name), tokens)

    @command
    def resume(self, name: str, reserve_tokens: int) -> Admission | Wait:
        """Load a retracted request back to the device."""
        return self._owned.resume(self._owned_request(name), reserve_tokens)

    @command
    def release(self, name: str) -> bool:
        """Forget a request and free its pages; pages that have landed for its prefetch stay cached.

        Returns True if the request's lent device pages are free. If a copy on some rank still touches
        them, returns False, and the effects of a later verdict name the request as freed.
        """
        request = self.requests.known(name)
        self.prefetching.stop(request)
        self.serving.stop(request)
        return self.device.release(request)

    @command
    def serve(self, name: str, tokens: bytes, ttl_ms: int) -> int:
        """Let other groups read a request's computed pages; return how many tokens are readable."""
        return self.serving.serve(self.requests.known(name), tokens, ttl_ms)

    @command
    def pin(self, name: str, namespace: str, tokens: bytes, ttl_ms: int) -> int:
        """Pin the cached prefix of `tokens` for `ttl_ms`; return its length in tokens."""
        return self.pinning.pin(name, self.requests.place(namespace), tokens, ttl_ms)

    @command
    def unpin(self, name: str) -> bool:
        """Remove a pin; return False if there is no such pin or it has expired."""
        return self.pinning.unpin(name)

    @command
    def match_host(self, name: str, namespace: str, tokens: bytes, device_tokens: int) -> int:
        """Return the number of tokens that host memory can restore after the first `device_tokens`."""
        lent = self._lent
        request = self._enter(name, namespace)
        assert isinstance(request, LentRequest)
        # Add the engine's cached tokens to the digest: if they differ, the ranks run different batches.
        self.journal.record("hit", name, device_tokens)
        return lent.match_host(request, tokens, device_tokens)

    @command
    def admit(self, name: str, namespace: str, tokens: bytes, device_tokens: int) -> None:
        """Count a request's cached and missed `tokens` at the start of its computation."""
        lent, request = self._lent, self._enter(name, namespace)
        assert isinstance(request, LentRequest)
        lent.admit(request, tokens, device_tokens)

    @command
    def load(self, name: str, tokens: bytes, start_tokens: int, runs: Sequence[PageRun]) -> None:
        """Copy pages of `tokens` to device pages that the engine lends."""
        request = self._lent_request(name)
        # Check the load before ending the prefetch, because a refused call must change nothing.
        self._lent.require_loadable(request, tokens, start_tokens, runs)
        self.prefetching.stop(request)
        self._lent.load(request, tokens, start_tokens, runs)

    @command
    def back_up(self, name: str, namespace: str, tokens: bytes, runs: Sequence[PageRun]) -> int:
        """Back up `tokens` from lent device pages: copy those pages that host memory lacks."""
        lent = self._lent
        lent.require_lent(name, tokens, runs)
        request = self._enter(name, namespace)
        assert isinstance(request, LentRequest)
        return lent.back_up(request, tokens, runs)

    @command
    def fence(self, name: str) -> None:
        """Make this rank end its copies of a request's lent pages; the engine may overwrite them."""
        request = self._lent_request(name)
        self._lent.require_no_copy(request)
        if not self.requests.is_current(request.place):
            # End the prefetch: after a reset, a fence moves the request to a new tree, and the prefetch
            # fills the old tree.
            self.prefetching.stop(request)
        self._lent.fence(request)

    @command
    def retract_lent(self, name: str, tokens: bytes, runs: Sequence[PageRun]) -> bool:
        """Save a request from lent device pages to host memory; return False if the host is full."""
        return self._lent.retract(self._lent_request(name), tokens, runs)

    @command
    def resume_lent(self, name: str, runs: Sequence[PageRun], device_tokens: int) -> Wait | None:
        """Load a retracted request back to device pages that the engine lends."""
        request = self._lent_request(name)
        answer = self._lent.resume(request, runs, device_tokens)
        if answer is Wait.LOST:
            # End the prefetch: a request that lost its pages may move to a new tree, and the prefetch
            # fills the old tree.
            self.prefetching.stop(request)
        return answer

    @command
    def write_out(self) -> None:
        """Retry all postponed backups and persists at once."""
        self.journal.record("write out")
        self.retrying.now()

    @command
    def reset(self, weights_version: str | None = None) -> None:
        """Reset the cache: hide all cached pages from every request that is not admitted yet."""
        self.clearing.reset(weights_version)

    @command
    def drop(self, namespace: str | None) -> Dropped:
        """Evict the unused pages of a namespace, or of all namespaces if `namespace` is None."""
        return self.clearing.drop(namespace)

    @command
    def limit(self, limit: NamespaceLimit) -> None:
        """Set the quota and time to live of a namespace."""
        self.clearing.limit(limit)

    def apply(self, verdict: Verdict) -> Effects:
        """Apply the verdict of a round: prefetches by id, then each watermark queue in order."""
        clock = self.clock
        clock.agreed_ms = max(clock.agreed_ms, verdict.time_ms)
        self.store.forget_old_misses()
        self.misses.settle()
        for each in verdict.prefetch_slots:
            if isinstance(each, PrefetchFound):
                self.prefetching.found(each)
            else:
                self.prefetching.arrived(each)
        for watermark in verdict.watermarks:
            self._settle(watermark)
        self.operation_table.requeue_behind_others()
        self.attaching.consider(verdict.proposed)
        self.messages.reach(verdict.requests)
        self.prefetching.expire_waiting()
        self.pinning.look_after()
        self.serving.look_after()
        self.prefixes.allocator.enforce_limits(clock.agreed_ms)
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
        if isinstance(self.device, LentDevice) and self.device.is_finishing(name):
            raise UsageError(f"request {name!r} still lends pages; wait until it is freed")
        return self.requests.enter(name, namespace)

    def _settle(self, watermark: Watermark) -> None:
        queue = watermark.queue
        for operation, well in self.operation_table.settled(watermark):
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
        """Quarantine an operation whose I/O did not end in time, and check the bounds."""
        self.operation_table.quarantine(operation, rank)
        if isinstance(operation, Copy):
            self.device.quarantined(operation)
        elif isinstance(operation, Prefetch):
            self.prefetching.quarantined(operation)
        if operation.is_for_store:
            if self.quarantine.store_keeps_too_much():
                # Detach a store whose I/O never ends, because such I/O would use up the host pool page
                # by page.
                self.attaching.detach(KEEPS_TOO_MUCH)
        elif excess := self.quarantine.exceeds_budget():
            what = f"{operation.kind.name.lower().replace('_', ' ')} {operation.id}"
            self.lost = f"{excess}; the last is {what}, which hangs on rank {rank}"
            self.outbox.lost = self.lost
        self.prefetching.begin_waiting()
