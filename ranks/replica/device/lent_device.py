"""Engine-owned device pages (lent): the engine allocates them and lends them for copies.

The engine names a request's pages in a command and keeps their contents until the copies have finished
on every rank. Page numbers are opaque and may differ between ranks, so they appear only in orders,
never in the digest.

    before computing     `match_host` returns how many tokens host memory can restore, `load` copies
                         their pages, and `admit` counts hits and misses
    after computing      `back_up` copies whole pages to the host
    before overwriting   `fence` ends this rank's copies of the request's pages
    under pressure       `retract` saves all of a request's pages, and `resume` restores them
    at the end           `release` returns whether the pages are free; if not, a later effect reports
                         when they are
"""

from collections.abc import Sequence

from ....coordinator.operation import OperationKind, Outcome, Phase
from ....errors import UsageError
from ...protocol.answers import Wait
from ...protocol.events import Hit
from ...protocol.orders import Fence
from ..core.pages import PageRun, page_run
from ..core.replica_parts import ReplicaParts
from ..operations.backing_up import BackingUp
from ..operations.kinds import Copy, LoadBack, Loading, Resume, Retract
from ..operations.lent import (
    Lent,
    lent_for_all,
    require_all,
    require_prefix,
    unfilled_after,
    without_unfilled,
)
from ..operations.loading_back import LoadingBack, TailPages
from ..operations.operation_table import OperationTable
from ..operations.requests import (
    LentRequest,
    LoadState,
    Request,
    RequestEvent,
    Requests,
    Stage,
    require_name,
)
from ..operations.retraction import Retraction
from ..tree.components import Component
from ..tree.matching import Missing, lacking, match
from ..tree.node import DEVICE, HOST, Node, covered
from ..tree.prefixes import Prefixes
from ..tree.tokens import TOKEN_BYTES
from .device import Follows

_COPYING = (Stage.LOADING, Stage.STOPPING, Stage.SAVING)


class LentDevice:
    """Starts copies to and from device pages that an engine lends."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        requests: Requests,
        loading_back: LoadingBack,
        backing_up: BackingUp,
        saving: Retraction,
    ) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._prefixes = prefixes
        self._components = prefixes.components
        self._operation_table = operation_table
        self._requests = requests
        self._loading_back = loading_back
        self._backing_up = backing_up
        self._saving = saving
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._seen = basis.misses
        self._operations = operation_table.in_flight
        self.leaving: dict[str, LentRequest] = {}
        """By name: released requests whose lent device pages a copy in flight still touches."""

    def follows(self) -> dict[OperationKind, Follows]:
        return {
            OperationKind.LOAD_BACK: Follows(self._quiet, self._loaded, self._load_failed),
            OperationKind.RESUME: Follows(self._quiet, self._loaded, self._load_failed),
            OperationKind.RETRACT: Follows(self._quiet, self._saving.ended, self._save_failed),
        }

    def load_state(self, request: Request) -> LoadState:
        """Return the state of a request's page copies; a request without a copy is ready to compute.

        A failed load is reported only when no rank's copy touches the lent pages any more.
        """
        assert isinstance(request, LentRequest)
        if request.stage is Stage.SAVED and not all(map(self._hangs, self._copies_of(request))):
            # The request is saved, but an earlier backup still reads the request's device pages. Report
            # SAVING until that backup ends.
            return LoadState.SAVING
        return request.load_state or LoadState.READY

    def match_host(self, request: LentRequest, tokens: bytes, device_tokens: int) -> int:
        """Return the number of tokens that host memory can restore after the first `device_tokens`.

        Returns 0 after a failed load: the request computes instead of retrying forever.
        """
        self._requests.digest_tokens("hit", request.id, tokens)
        return max(0, self._restorable(request, tokens) - device_tokens)

    def admit(self, request: LentRequest, tokens: bytes, device_tokens: int) -> None:
        """Publish a request's hit event: how many of `tokens` are cached and missed.

        The engine has the first `device_tokens` on the device, including tokens that `load` copied.
        """
        self._requests.digest_tokens("admit", request.id, tokens, device_tokens)
        unit, requested = self._config.page_tokens, len(tokens) // TOKEN_BYTES
        cached = min(device_tokens, requested)
        first, last = request.loaded
        brought = max(0, min(cached, last * unit) - first * unit)
        first, last = max(first, request.fetched[0]), min(last, request.fetched[1])
        fetched = max(0, min(cached, last * unit) - first * unit)
        missed, seen = self._seen.count(request.place, tokens, unit, cached, request.sought)
        on_device, from_host, source = cached - brought, brought - fetched, request.source
        hit = Hit(request.id, requested, on_device, from_host, fetched, missed, source)
        self._outbox.events.append(hit)
        self._seen.record_lookup(seen)
        request.forget_sources()

    def require_loadable(
        self, request: LentRequest, tokens: bytes, start_tokens: int, runs: Sequence[PageRun]
    ) -> None:
        """Raise `UsageError` if host memory lacks a page to load, or the request lends too few pages.

        Changes nothing.
        """
        self.require_no_copy(request)
        unit = self._config.page_tokens
        first, last = start_tokens // unit, self._prefixes.tree.whole_pages(tokens)
        if start_tokens % unit or not 0 <= first < last or last - first != len(runs[0]):
            raise UsageError(
                f"request {request.id!r} lends {len(runs[0])} device pages to load the pages {first} to"
                f" {last}, from token {start_tokens}; start at a multiple of {unit} tokens, and lend"
                " one page for each"
            )
        found = self._restorable(request, tokens) // unit
        if found < last:
            raise UsageError(
                f"request {request.id!r} loads {last} pages, and host memory has {found}; call"
                " `match_host` in the same step"
            )
        starts = self._starts(first, last)
        Lent(request.id, first, last, runs).require(self._components, starts)

    def load(
        self, request: LentRequest, tokens: bytes, start_tokens: int, runs: Sequence[PageRun]
    ) -> None:
        """Load the whole pages of `tokens` after `start_tokens` into the lent device pages `runs`."""
        self._requests.digest_tokens("load", request.id, tokens)
        prefixes, unit = self._prefixes, self._config.page_tokens
        root, first = prefixes.root(request.place), start_tokens // unit
        nodes = prefixes.walk_to(root, tokens)
        node = nodes[-1] if nodes else root
        lent = Lent(request.id, first, node.end, runs)
        if first:
            prefixes.cut(node, first)
        prefixes.cut_for(node)
        self._clock.tick()
        prefixes.use(node)
        starts = self._starts(first, node.end)
        missing = self._lacking(self._components, node, starts)
        pages = lent.pages_for(missing, self._components)
        self._loading_back.begin(request, node, missing, pages, lent=True)
        self._load_began(request, first, starts)
        request.loaded = request.loaded[0] if request.loaded[1] == first else first, node.end

    def require_lent(self, name: str, tokens: bytes, runs: Sequence[PageRun]) -> None:
        """Raise `UsageError` if a request lends too few pages for a backup. Changes nothing."""
        require_prefix(name, self._components, runs, self._prefixes.tree.whole_pages(tokens))

    def back_up(self, request: LentRequest, tokens: bytes, runs: Sequence[PageRun]) -> int:
        """Back up whole pages of `tokens`; return how many tokens are on the host or being copied.

        `runs` are, by component, the device pages of the whole prefix. The engine must keep their
        contents until the copies have finished.
        """
        self.require_no_copy(request)
        digest = self._requests.digest_pages("back up", request.id, tokens)
        self._seen.computed(request.place, digest)
        self._requests.move(request, RequestEvent.COMPUTE)
        if not self._prefixes.tree.whole_pages(tokens) or not self._config.host_pages:
            return 0
        node = self._publish(request, tokens)
        lent = self._lent(request, tokens, node.end, runs)
        for number in self._backing_up.back_up_lent(node, lent):
            self._began(request, number)
        last = covered(node)
        self._prefixes.allocator.prune(node)
        return last * self._config.page_tokens

    def fence(self, request: LentRequest) -> None:
        """Make this rank end its copies of a request's lent pages; the engine may then overwrite them.

        A copy that does not finish in time counts as failed on this rank. Afterwards the request counts
        as having computed nothing.
        """
        self.require_no_copy(request)
        self._backing_up.engine_gave_up(request.id)
        copies = self._copies_of(request)
        request.copies, request.loaded = frozenset(), (0, 0)
        self._requests.move(request, RequestEvent.FENCE)
        self._journal.record("fence", request.id, len(copies))
        if copies:
            timeout_s = self._config.timeouts.fence_s
            self._outbox.orders.append(Fence(tuple(sorted(copies)), timeout_s))
        self._requests.renew(request)

    def retract(self, request: LentRequest, tokens: bytes, runs: Sequence[PageRun]) -> bool:
        """Save all pages of a request to host memory; return False if there is no room.

        `runs` are the device pages by component: one for each page of `tokens`, including a partial
        last page, and the slot of the state after `tokens`.
        """
        self.require_no_copy(request)
        unit, computed = self._config.page_tokens, len(tokens) // TOKEN_BYTES
        runs = without_unfilled(runs, request.unfilled)
        require_all(request.id, self._components, runs, -(-computed // unit), state=computed > 0)
        self._requests.digest_tokens("retract", request.id, tokens)
        self._requests.move(request, RequestEvent.COMPUTE)
        if not self._config.host_pages:
            return False
        node = self._publish(request, tokens)
        self._prefixes.cut_for(node)
        lent = self._lent(request, tokens, node.end, runs)
        starts = [lent.needed_from(each) for each in self._components]
        for start in starts:
            self._prefixes.cut(node, start)
        tail = [
            run[node.end :] if each.per_page else run
            for each, run in zip(self._components, runs, strict=True)
        ]
        pins = self._saving.begin(request, tokens, node, tail, lent)
        if pins is None:
            self._prefixes.allocator.prune(node)
            return False
        self._began(request, request.waits_for)
        request.locks, request.node, request.prefix = pins, node, node.end
        request.saved_from = starts
        # Record the saved positions in the journal, because they depend on the engine's pages and must
        # be equal on every rank.
        self._journal.record("saved from", request.id, starts)
        return True

    def resume(
        self, request: LentRequest, runs: Sequence[PageRun], device_tokens: int
    ) -> Wait | None:
        """Load a retracted request back to lent device pages; return None if the load has begun.

        `runs` are, by component, the pages from `device_tokens` to the last computed token, and the
        state slot.
        """
        if request.stage is not Stage.SAVED:
            raise UsageError(f"request {request.id!r} is not retracted; nothing can be resumed")
        unit, computed = self._config.page_tokens, request.computed
        lent = lent_for_all(request.id, self._components, runs, device_tokens, computed, unit)
        assert request.node is not None
        wait = self._bring_back(request, request.node, lent, request.saved_from)
        if wait is Wait.LOST:
            # The request cannot be resumed: host memory lacks a page of the request's shared prefix,
            # because another request's backup of that page has failed.
            self._saving.lose(request, RequestEvent.LOSE)
        return wait

    def release(self, request: Request) -> bool:
        assert isinstance(request, LentRequest)
        self._saving.let_go(request)
        self._backing_up.engine_gave_up(request.id)
        copies = self._copies_of(request)
        self._requests.leave(request)
        if copies:
            self.leaving[request.id] = request
        return not copies

    def quarantined(self, operation: Copy) -> None:
        """Let a request stop waiting for a quarantined `Retract`: a retract only reads lent pages."""
        if isinstance(operation, Retract):
            self._wait_no_more(operation)

    def after_verdict(self) -> None:
        for name in [name for name, each in self.leaving.items() if not self._copies_of(each)]:
            del self.leaving[name]
            self._outbox.freed.append(name)

    def touching(self, name: str | None, *, awaited: bool = False) -> tuple[int, ...]:
        """Return the ids of the copies in flight that touch lent pages of a request.

        If `name` is None, returns those of all requests. With `awaited`, leaves out quarantined copies,
        which may never end. Changes nothing.
        """
        if awaited:
            return tuple(each for each in self.touching(name) if not self._hangs(each))
        if name is None:
            return tuple(n for n, each in self._operations.items() if isinstance(each, Copy))
        request = self._requests.get(name) or self.leaving.get(name)
        return tuple(sorted(self._copies_of(request))) if isinstance(request, LentRequest) else ()

    def is_finishing(self, name: str) -> bool:
        """Return whether copies still touch lent pages of a released request."""
        require_name("request", name)
        return name in self.leaving

    @property
    def waits(self) -> bool:
        """Whether lent pages of a released request will be free once copies in flight have ended.

        A request with a quarantined copy is not counted, because that copy may never end.
        """
        return any(not any(map(self._hangs, each.copies)) for each in self.leaving.values())

    def _copies_of(self, request: LentRequest) -> frozenset[int]:
        return frozenset(number for number in request.copies if number in self._operations)

    def _hangs(self, copy: int) -> bool:
        operation = self._operations.get(copy)
        return operation is not None and operation.phase is Phase.QUARANTINED

    def _began(self, request: LentRequest, copy: int | None) -> None:
        if copy is not None:
            request.copies = self._copies_of(request) | {copy}

    def _load_began(self, request: LentRequest, first: int, starts: Sequence[int]) -> None:
        """Record the load that a request waits for, and the lent pages that the load leaves unfilled.

        The engine lends pages from position `first` on. The load fills each component from its position
        in `starts` on.
        """
        load, before = request.waits_for, request.unfilled
        assert load is not None
        self._began(request, load)
        request.unfilled = unfilled_after(load, self._components, first, starts, before)
        # Record the unfilled positions in the journal, because they depend on the lent pages and must
        # be equal on every rank.
        self._journal.record("unfilled", load, first, starts)

    def _restorable(self, request: LentRequest, tokens: bytes) -> int:
        return (
            0 if request.copy_failed else match(self._prefixes, request.place, tokens).host_tokens
        )

    def _bring_back(
        self, request: LentRequest, node: Node, lent: Lent, starts: Sequence[int]
    ) -> Wait | None:
        """Load the prefix that ends at `node` and the request's saved pages into lent device pages.

        Each component is loaded from `starts`, or from its first lent position if that is later.
        Returns `Wait.LOST` if host memory lacks a needed page, None if the load has begun.
        """
        assert request.saved is not None
        prefixes, saved = self._prefixes, request.saved
        starts = list(map(max, starts, map(lent.needed_from, self._components)))
        for start in starts:
            prefixes.cut(node, start)
        needed = self._lacking(self._saving.shared, node, starts)
        if any(each.values[HOST][index] is None for each, index in needed):
            return Wait.LOST
        tail = [run[len(run) - len(host) :] for run, host in zip(lent.runs, saved, strict=True)]
        self._clock.tick()
        prefixes.use(node)
        pins, request.locks = request.locks, ()
        request.saved, request.node, request.prefix = None, None, 0
        pages, brought = lent.pages_for(needed, self._components), TailPages(tail, saved)
        self._loading_back.begin(request, node, needed, pages, brought, lent=True)
        request.unfilled = ()
        self._load_began(request, lent.first, starts)
        prefixes.allocator.release(pins)
        return None

    def _publish(self, request: LentRequest, tokens: bytes) -> Node:
        """Return the node at which the whole pages of `tokens` end, marked as used; add it if missing.

        The use counts even without a backup, so that a full host tier does not evict a prefix in use.
        """
        prefixes = self._prefixes
        whole = tokens[: prefixes.tree.whole_pages(tokens) * prefixes.tree.page_bytes]
        root = prefixes.root(request.place)
        self._clock.tick()
        node = prefixes.grow_to(root, whole)
        prefixes.use(node)
        self._journal.record("lend", request.id, node.end)
        return node

    def _lent(self, request: LentRequest, tokens: bytes, end: int, runs: Sequence[PageRun]) -> Lent:
        """Return the lent pages of the prefix up to `end`, and the state if `tokens` end there."""
        at_page = len(tokens) == end * self._prefixes.tree.page_bytes
        kept = [
            run if each.per_page or at_page else page_run()
            for each, run in zip(self._components, runs, strict=True)
        ]
        return Lent(request.id, 0, end, without_unfilled(kept, request.unfilled))

    def _starts(self, first: int, last: int) -> list[int]:
        """Return, by component, the first position to load, not before `first`.

        The prefix to load ends at `last`.
        """
        return [
            max(first, each.needed_from(last)) if each.per_page else first
            for each in self._components
        ]

    def _lacking(
        self, components: Sequence[Component], node: Node, starts: Sequence[int]
    ) -> list[Missing]:
        """Return the (node, component) pairs on the path to `node` whose pages the device lacks.

        Only nodes at or after the component's position in `starts` are included.
        """
        lacks = lacking(components, node, DEVICE)
        return [(each, index) for each, index in lacks if each.start >= starts[index]]

    def _loaded(self, operation: Loading) -> None:
        self._loading_back.settle(operation)
        self._operation_table.finish(operation, Outcome.COMPLETE)

    def _load_failed(self, operation: LoadBack | Resume) -> None:
        """Stop a failed load; the request waits until no rank's copy touches its pages."""
        self._loading_back.note_failed(operation)
        self._stop(operation)
        self._loading_back.failed(operation)

    def _save_failed(self, operation: Retract) -> None:
        self._stop(operation)
        self._operation_table.stop(operation, Outcome.FAILED)

    def _stop(self, operation: LoadBack | Resume | Retract) -> None:
        request = self._requests.waiting_for(operation.request, operation)
        if isinstance(request, LentRequest):
            self._requests.move(request, RequestEvent.STOP)
            self._saving.let_go(request)
            first, last = request.loaded
            # Count the pages copied by earlier loads as loaded; they stay valid although this load
            # failed.
            failed_from = min((node.start for node, _ in operation.segments), default=0)
            request.loaded = first, max(first, min(last, failed_from))
            # Forget the positions that the failed load left unfilled, because the engine will compute
            # them.
            request.unfilled = [e for e in request.unfilled if e.load != operation.id]

    def _quiet(self, operation: LoadBack | Resume | Retract) -> None:
        self._wait_no_more(operation)
        self._operation_table.finish(operation)

    def _wait_no_more(self, operation: LoadBack | Resume | Retract) -> None:
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, RequestEvent.QUIET)
            request.waits_for = None

    def require_no_copy(self, request: LentRequest) -> None:
        """Raise `UsageError` if the request is retracted or a copy of its pages is in flight."""
        if request.stage in _COPYING:
            raise UsageError(f"request {request.id!r} has a copy in flight; wait for it")
        if request.stage is Stage.SAVED:
            raise UsageError(f"request {request.id!r} is retracted; resume or release it")
