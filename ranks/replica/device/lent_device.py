"""Device pages that the engine owns, and lends for copies.

The engine names pages of a request in a command, and leaves them as they are until the copies have
ended on every rank. To the replica they are opaque. They go into the order and into nothing else,
since they may differ between ranks, and the digest must not.

    before it computes   `hit` says how much host memory can bring, `load` brings it, `admit` counts it
    after it computed    `back_up` copies whole pages to the host
    before it overwrites `fence` ends the backups that read the request's pages, on this rank
    under pressure       `retract` saves all that a request has, and `resume` brings it back
    at the end           `release` says whether its pages are free; if not, a later effect will
"""

from collections.abc import Sequence

from ....coordinator.operation import Kind, Outcome, Phase
from ....errors import UsageError
from ...protocol.answers import Wait
from ...protocol.notices import Hit
from ...protocol.orders import Fence
from ..core.basis import Basis
from ..core.pages import PageRun, page_run
from ..operations.agenda import Agenda
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
from ..operations.requests import (
    Event,
    LentRequest,
    LoadState,
    Request,
    Requests,
    Stage,
    require_name,
)
from ..operations.saving import Saving
from ..tree.components import Component
from ..tree.matching import Missing, lacking, match
from ..tree.node import DEVICE, HOST, Node, covered
from ..tree.prefixes import Prefixes
from ..tree.tokens import TOKEN_BYTES
from .device import Follows

_COPYING = (Stage.LOADING, Stage.STOPPING, Stage.SAVING)


class LentDevice:
    """Begins copies to and from the device pages that an engine lends."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: Basis,
        prefixes: Prefixes,
        agenda: Agenda,
        requests: Requests,
        loading_back: LoadingBack,
        backing_up: BackingUp,
        saving: Saving,
    ) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._prefixes = prefixes
        self._components = prefixes.components
        self._agenda = agenda
        self._requests = requests
        self._loading_back = loading_back
        self._backing_up = backing_up
        self._saving = saving
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._seen = basis.misses
        self._operations = agenda.in_flight
        self.leaving: dict[str, LentRequest] = {}
        """Requests that were released, whose device pages copies still touch."""

    def follows(self) -> dict[Kind, Follows]:
        return {
            Kind.LOAD_BACK: Follows(self._quiet, self._loaded, self._load_failed),
            Kind.RESUME: Follows(self._quiet, self._loaded, self._load_failed),
            Kind.RETRACT: Follows(self._quiet, self._saving.ended, self._save_failed),
        }

    def load_state(self, request: Request) -> LoadState:
        """See `Device`. A request for which nothing was loaded is ready to compute.

        A load that failed is told of only once no rank's copy touches the lent pages any more.
        """
        assert isinstance(request, LentRequest)
        if request.stage is Stage.SAVED and not all(map(self._hangs, self._copies_of(request))):
            # A backup that it had begun before still reads its pages.
            return LoadState.SAVING
        return request.load_state or LoadState.READY

    def hit(self, request: LentRequest, tokens: bytes, device_tokens: int) -> int:
        """Return how many tokens host memory can bring beyond `device_tokens`.

        Nothing for a request whose load failed once: it computes, and does not loop.
        """
        self._requests.witness_tokens("hit", request.id, tokens)
        return max(0, self._restorable(request, tokens) - device_tokens)

    def admit(self, request: LentRequest, tokens: bytes, device_tokens: int) -> None:
        """Put out a notice of what a request begins with, of `tokens` that it could have had.

        The engine has the first `device_tokens` of them on the device, with what was loaded.
        """
        self._requests.witness_tokens("admit", request.id, tokens, device_tokens)
        unit, asked = self._config.page_tokens, len(tokens) // TOKEN_BYTES
        cached = min(device_tokens, asked)
        first, last = request.loaded
        brought = max(0, min(cached, last * unit) - first * unit)
        first, last = max(first, request.fetched[0]), min(last, request.fetched[1])
        fetched = max(0, min(cached, last * unit) - first * unit)
        missed, seen = self._seen.count(request.place, tokens, unit, cached, request.sought)
        on_device, from_host, source = cached - brought, brought - fetched, request.source
        told = Hit(request.id, asked, on_device, from_host, fetched, missed, source)
        self._outbox.notices.append(told)
        self._seen.asked(seen)
        request.forget_sources()

    def require_loadable(
        self, request: LentRequest, tokens: bytes, start_tokens: int, runs: Sequence[PageRun]
    ) -> None:
        """Raise `UsageError` for a load that was not promised or has no place. Reads only."""
        self.require_no_copy(request)
        unit = self._config.page_tokens
        first, last = start_tokens // unit, self._prefixes.tree.whole_pages(tokens)
        if start_tokens % unit or not 0 <= first < last or last - first != len(runs[0]):
            raise UsageError(
                f"request {request.id!r} lends {len(runs[0])} device pages for the pages {first} to"
                f" {last} of {unit} tokens each, from token {start_tokens}"
            )
        found = self._restorable(request, tokens) // unit
        if found < last:
            raise UsageError(
                f"request {request.id!r} loads {last} pages, and host memory has {found}; ask `hit`"
                " in the same step"
            )
        starts = self._starts(first, last)
        Lent(request.id, first, last, runs).require(self._components, starts)

    def load(
        self, request: LentRequest, tokens: bytes, start_tokens: int, runs: Sequence[PageRun]
    ) -> None:
        """Copy the whole pages of `tokens` from `start_tokens` on to the device pages that are lent."""
        self._requests.witness_tokens("load", request.id, tokens)
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
        """Raise `UsageError` if a request lends too few pages for a backup. Reads only."""
        require_prefix(name, self._components, runs, self._prefixes.tree.whole_pages(tokens))

    def back_up(self, request: LentRequest, tokens: bytes, runs: Sequence[PageRun]) -> int:
        """Copy to the host what of `tokens` is not there; return how many tokens will be then.

        `runs` are the device pages of the whole prefix, which belong to the request until its
        copies have ended.
        """
        self.require_no_copy(request)
        digest = self._requests.witness_pages("back up", request.id, tokens)
        self._seen.computed(request.place, digest)
        self._requests.move(request, Event.COMPUTE)
        if not self._prefixes.tree.whole_pages(tokens) or not self._config.host_pages:
            return 0
        node = self._publish(request, tokens)
        lent = self._lent(request, tokens, node.end, runs)
        for number in self._backing_up.back_up_lent(node, lent):
            self._began(request, number)
        last = covered(node)
        self._prefixes.residence.prune(node)
        return last * self._config.page_tokens

    def fence(self, request: LentRequest) -> None:
        """Let the engine overwrite the request's pages: its copies end here or vote failed.

        The request goes on as one that has computed nothing.
        """
        self.require_no_copy(request)
        self._backing_up.lender_gave_up(request.id)
        copies = self._copies_of(request)
        request.copies, request.loaded = frozenset(), (0, 0)
        self._requests.move(request, Event.FENCE)
        self._journal.record("fence", request.id, len(copies))
        if copies:
            timeout_s = self._config.timeouts.fence_s
            self._outbox.orders.append(Fence(tuple(sorted(copies)), timeout_s))
        self._requests.renew(request)

    def retract(self, request: LentRequest, tokens: bytes, runs: Sequence[PageRun]) -> bool:
        """Copy all that a request has to host memory; False, and it goes on, if there is no room.

        `runs` are its device pages, by component: of every page of `tokens`, also of one that is not
        full yet, and the slot that holds the state after them.
        """
        self.require_no_copy(request)
        unit, computed = self._config.page_tokens, len(tokens) // TOKEN_BYTES
        runs = without_unfilled(runs, request.unfilled)
        require_all(request.id, self._components, runs, -(-computed // unit), state=computed > 0)
        self._requests.witness_tokens("retract", request.id, tokens)
        self._requests.move(request, Event.COMPUTE)
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
            self._prefixes.residence.prune(node)
            return False
        self._began(request, request.waits_for)
        request.locks, request.node, request.prefix = pins, node, node.end
        request.saved_from = starts
        # It follows from which pages the engine still has, which must be the same on every rank.
        self._journal.record("saved from", request.id, starts)
        return True

    def resume(
        self, request: LentRequest, runs: Sequence[PageRun], device_tokens: int
    ) -> Wait | None:
        """Bring a retracted request back to device pages that are lent; None once that has begun.

        `runs` are by component the pages of the positions from `device_tokens` on, up to what it had
        computed, and the slot for its state.
        """
        if request.stage is not Stage.SAVED:
            raise UsageError(f"request {request.id!r} is not retracted; nothing can be resumed")
        unit, computed = self._config.page_tokens, request.computed
        lent = lent_for_all(request.id, self._components, runs, device_tokens, computed, unit)
        assert request.node is not None
        wait = self._bring_back(request, request.node, lent, request.saved_from)
        if wait is Wait.LOST:
            # A backup of it that somebody else had begun has failed.
            self._saving.lose(request, Event.LOSE)
        return wait

    def release(self, request: Request) -> bool:
        assert isinstance(request, LentRequest)
        self._saving.let_go(request)
        self._backing_up.lender_gave_up(request.id)
        copies = self._copies_of(request)
        self._requests.leave(request)
        if copies:
            self.leaving[request.id] = request
        return not copies

    def quarantined(self, operation: Copy) -> None:
        """See `Device`: a copy to host memory only reads what is lent, and fills what nobody finds."""
        if isinstance(operation, Retract):
            self._wait_no_more(operation)

    def after_verdict(self) -> None:
        for name in [name for name, each in self.leaving.items() if not self._copies_of(each)]:
            del self.leaving[name]
            self._outbox.freed.append(name)

    def touching(self, name: str | None, *, awaited: bool = False) -> tuple[int, ...]:
        """Return the copies that touch pages lent by a request, or by any. Reads only.

        Only those that are waited for, with `awaited`.
        """
        if awaited:
            return tuple(each for each in self.touching(name) if not self._hangs(each))
        if name is None:
            return tuple(n for n, each in self._operations.items() if isinstance(each, Copy))
        request = self._requests.get(name) or self.leaving.get(name)
        return tuple(sorted(self._copies_of(request))) if isinstance(request, LentRequest) else ()

    def is_leaving(self, name: str) -> bool:
        """Say whether a request was released and still lends pages."""
        require_name("request", name)
        return name in self.leaving

    @property
    def waits(self) -> bool:
        """Whether some released request's device pages are not free yet, and will be.

        Those of a copy that is quarantined may never be.
        """
        return any(not any(map(self._hangs, each.copies)) for each in self.leaving.values())

    def _copies_of(self, request: LentRequest) -> frozenset[int]:
        """Return the copies in flight that touch what a request lends."""
        return frozenset(number for number in request.copies if number in self._operations)

    def _hangs(self, copy: int) -> bool:
        """Say whether a copy is quarantined, which is waited for no longer."""
        operation = self._operations.get(copy)
        return operation is not None and operation.phase is Phase.QUARANTINED

    def _began(self, request: LentRequest, copy: int | None) -> None:
        """Take note of a copy of what a request lends, if there is one."""
        if copy is not None:
            request.copies = self._copies_of(request) | {copy}

    def _load_began(self, request: LentRequest, first: int, starts: Sequence[int]) -> None:
        """Take note of the load that a request waits for, and of lent pages that it does not fill.

        It fills those of each component from `starts` on, of the pages that are lent from `first` on.
        """
        load, before = request.waits_for, request.unfilled
        assert load is not None
        self._began(request, load)
        request.unfilled = unfilled_after(load, self._components, first, starts, before)
        # It follows from which pages the engine lends, which must be the same on every rank.
        self._journal.record("unfilled", load, first, starts)

    def _restorable(self, request: LentRequest, tokens: bytes) -> int:
        return 0 if request.barred else match(self._prefixes, request.place, tokens).host_tokens

    def _bring_back(
        self, request: LentRequest, node: Node, lent: Lent, starts: Sequence[int]
    ) -> Wait | None:
        """Load the prefix that ends at `node`, and what the request has saved; None once that began.

        Of each component from `starts` on, or from where the engine lends pages for it.
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
        prefixes.residence.release(pins)
        return None

    def _publish(self, request: LentRequest, tokens: bytes) -> Node:
        """Return the node for the whole pages of what was computed, used now.

        It is used now even if nothing follows, so that a full host does not evict what is in use.
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
        """Return what is lent of use: a state only where the tokens end with a whole page."""
        at_page = len(tokens) == end * self._prefixes.tree.page_bytes
        kept = [
            run if each.per_page or at_page else page_run()
            for each, run in zip(self._components, runs, strict=True)
        ]
        return Lent(request.id, 0, end, without_unfilled(kept, request.unfilled))

    def _starts(self, first: int, last: int) -> list[int]:
        """Return by component the first position that a load of the pages up to `last` brings."""
        return [
            max(first, each.needed_from(last)) if each.per_page else first
            for each in self._components
        ]

    def _lacking(
        self, components: Sequence[Component], node: Node, starts: Sequence[int]
    ) -> list[Missing]:
        """Return what is to be brought for the path to `node`, by component from `starts` on."""
        lacks = lacking(components, node, DEVICE)
        return [(each, index) for each, index in lacks if each.start >= starts[index]]

    def _loaded(self, operation: Loading) -> None:
        self._loading_back.settle(operation)
        self._agenda.finish(operation, Outcome.COMPLETE)

    def _load_failed(self, operation: LoadBack | Resume) -> None:
        """The request waits until all copies are quiet."""
        self._loading_back.note_failed(operation)
        self._stop(operation)
        self._loading_back.failed(operation)

    def _save_failed(self, operation: Retract) -> None:
        self._stop(operation)
        self._agenda.stop(operation, Outcome.FAILED)

    def _stop(self, operation: LoadBack | Resume | Retract) -> None:
        request = self._requests.waiting_for(operation.request, operation)
        if isinstance(request, LentRequest):
            self._requests.move(request, Event.STOP)
            self._saving.let_go(request)
            first, last = request.loaded
            # Keep the pages that earlier loads have brought.
            failed_from = min((node.start for node, _ in operation.segments), default=0)
            request.loaded = first, max(first, min(last, failed_from))
            # What it has not brought is computed now.
            request.unfilled = [e for e in request.unfilled if e.load != operation.id]

    def _quiet(self, operation: LoadBack | Resume | Retract) -> None:
        self._wait_no_more(operation)
        self._agenda.finish(operation)

    def _wait_no_more(self, operation: LoadBack | Resume | Retract) -> None:
        """Tell the request of a copy that has failed before."""
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, Event.QUIET)
            request.waits_for = None

    def require_no_copy(self, request: LentRequest) -> None:
        """Raise `UsageError` for a request of which a copy is under way, or that is retracted."""
        if request.stage in _COPYING:
            raise UsageError(f"request {request.id!r} has a copy in flight; wait for it")
        if request.stage is Stage.SAVED:
            raise UsageError(f"request {request.id!r} is retracted; resume or release it")
