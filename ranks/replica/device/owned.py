"""Device pages that the replica owns: admission, publishing, retraction.

A request is admitted by `load_back`: its device prefix is locked, what host memory has beyond it is
on its way, and the pages that it will compute into are reserved. All of it happens or nothing does.
"""

from ....coordinator.operation import Kind, Outcome
from ....errors import UsageError
from ...protocol.answers import Admission, Wait
from ...protocol.notices import Hit
from ..core.basis import Basis
from ..core.pages import PageRun, page_run
from ..operations.agenda import Agenda
from ..operations.backing_up import BackingUp
from ..operations.kinds import Copy, LoadBack, Resume, Retract
from ..operations.lent import NO_PAGE
from ..operations.loading_back import LoadingBack, TailPages
from ..operations.requests import Event, LoadState, Request, Requests, Stage
from ..operations.saving import Saving
from ..tree.holds import Receipt
from ..tree.matching import Missing, lacking, reach
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from ..tree.tokens import TOKEN_BYTES
from .checkpoints import Checkpoints
from .device import Follows
from .publishing import Publishing


class OwnedDevice:
    """Admits requests, publishes what they compute, and lets go of what they hold."""

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
        self._page_tokens = basis.config.page_tokens
        self._clock = basis.clock
        self._prefixes = prefixes
        self._residence = prefixes.residence
        self._components = prefixes.components
        self._agenda = agenda
        self._requests = requests
        self._loading_back = loading_back
        self._backing_up = backing_up
        self._saving = saving
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._checkpoints = Checkpoints(basis.config, prefixes, basis.outbox)
        self._publishing = Publishing(basis, prefixes, requests, self._checkpoints, backing_up)

    def follows(self) -> dict[Kind, Follows]:
        """See `Device`."""
        finish = self._agenda.finish
        return {
            Kind.LOAD_BACK: Follows(finish, self._loaded, self._load_failed),
            Kind.RESUME: Follows(finish, self._resumed, self._load_failed),
            Kind.RETRACT: Follows(finish, self._saving.ended, self._save_failed),
        }

    def load_state(self, request: Request) -> LoadState:
        """See `Device`."""
        state = request.load_state
        if state is None:
            raise UsageError(f"request {request.id!r} is not admitted; call load_back first")
        return state

    def quarantined(self, operation: Copy) -> None:
        """See `Device`: nobody waits for a copy that has failed, since its pages are its own."""

    def after_verdict(self) -> None:
        """See `Device`; nothing is lent."""

    def release(self, request: Request) -> bool:
        """See `Device`."""
        self._saving.let_go(request)
        self._requests.leave(request)
        return True

    def admit(
        self, request: Request, tokens: bytes, reserve_tokens: int, priority: int = 0
    ) -> Admission | Wait:
        """Lock, load back and reserve for a request, or say why that has to wait."""
        prefixes = self._prefixes
        root = prefixes.root(request.place)
        nodes = prefixes.walk_to(root, tokens)
        on_device, best_end = self._reach(nodes)
        best = next((node for node in nodes if node.end == best_end), root)
        prefixes.cut_for(best)
        # Where the device has the whole length as it lies, nothing is to be looked for.
        missing = [] if on_device == best.end else lacking(self._components, best, DEVICE)
        for node, index in missing:
            if node.is_to_have(DEVICE, index):
                return Wait.LOADING
        reserved = max(0, -(-reserve_tokens // self._page_tokens) - best.end)
        room = [reserved if each.per_page else 1 for each in self._components]
        pages = self._take(best, missing, room)
        if pages is None:
            return Wait.NO_ROOM
        loading, own, locks = pages
        self._requests.move(request, Event.ADMIT)
        request.prefix, request.node, request.own, request.locks = best.end, best, own, locks
        request.checkpoints = self._checkpoints.wanted(nodes, best, tokens)
        request.ends = self._publishing.ends_of(nodes, tokens)
        request.priority = priority
        self._clock.tick()
        prefixes.use(best, hits=1, priority=priority)
        self._journal.record("admit", request.id, on_device, best.end, reserve_tokens, priority)
        if missing:
            # Making room may have cut nodes, which divides what is missing and changes no order.
            missing = lacking(self._components, best, DEVICE)
            self._loading_back.begin(request, best, missing, loading)
        else:
            self._checkpoints.fork(request)
        self._backing_up.was_hit(best)
        return self._admission(request, on_device, best.end, tokens)

    def extend(self, request: Request, total_tokens: int) -> bool:
        """Reserve device pages until the request has room for `total_tokens` tokens."""
        self._require_ready(request)
        total = -(-total_tokens // self._page_tokens)
        self._journal.record("extend", request.id, total_tokens)
        missing = total - request.prefix - len(request.own[0])
        if missing <= 0:
            return True
        counts = [missing if component.per_page else 0 for component in self._components]
        taken = self._prefixes.room.take(DEVICE, counts)
        if taken is None:
            return False
        for own, pages in zip(request.own, taken, strict=True):
            own.extend(pages)
        return True

    def insert(self, request: Request, tokens: bytes, *, final: bool) -> int:
        """Publish the whole pages of `tokens`; return how many tokens the tree now shares."""
        self._require_ready(request)
        return self._publishing.insert(request, tokens, final=final)

    def page_table(self, request: Request, pool: str) -> PageRun:
        """Return the device pages of a request that is ready, in token order; see `Cache`."""
        self._require_ready(request)
        component = next((c for c in self._components if c.pool == pool), None)
        if component is None:
            known = ", ".join(each.pool for each in self._components)
            raise UsageError(f"there is no pool {pool!r}; known: {known}")
        if not component.per_page:
            return page_run(request.own[component.index])
        table = page_run()
        start = component.needed_from(request.prefix)
        if request.node is not None:
            for node in request.node.path_down():
                pages = node.values[DEVICE][component.index] if node.start >= start else None
                table.extend([NO_PAGE] * node.width if pages is None else pages)
        table.extend(request.own[component.index])
        return table

    def retract(self, request: Request, tokens: bytes) -> bool:
        """Copy all that a request holds to host memory; its device pages are free once that is done.

        `tokens` are all that it has computed; their whole pages are published. False, and it goes on,
        if host memory has no room for it.
        """
        self._require_ready(request)
        self._publishing.require_room(request, len(tokens))
        self._publishing.insert(request, tokens, final=False)
        node = request.node
        assert node is not None
        tail = self._tail(request, len(tokens))
        pins = self._saving.begin(request, tokens, node, tail)
        if pins is None:
            return False
        # The tail's pages belong to the operation now, and the others that it had reserved are free.
        request.own = [run[len(part) :] for run, part in zip(request.own, tail, strict=True)]
        self._saving.let_go(request)
        request.locks, request.node, request.prefix = pins, node, node.end
        return True

    def resume(self, request: Request, reserve_tokens: int) -> Admission | Wait:
        """Bring a retracted request back to the device, or say why that has to wait."""
        if request.stage is not Stage.SAVED or request.node is None:
            raise UsageError(f"request {request.id!r} is not retracted; nothing can be resumed")
        wait = self._bring_back(request, request.node, reserve_tokens)
        if wait is Wait.LOST:
            # A backup of it that somebody else had begun has failed.
            self._saving.lose(request, Event.LOSE)
        if wait is not None:
            return wait
        return Admission(
            device_tokens=0,
            host_tokens=request.computed,
            storage_tokens=0,
            operation=request.waits_for,
        )

    def _bring_back(self, request: Request, node: Node, reserve_tokens: int) -> Wait | None:
        """Load the prefix that ends at `node`, and what the request has saved; None once that began."""
        assert request.saved is not None
        saved = request.saved
        self._prefixes.cut_for(node)
        missing = lacking(self._saving.shared, node, DEVICE)
        if any(each.is_to_have(DEVICE, index) for each, index in missing):
            return Wait.LOADING
        if any(each.values[HOST][index] is None for each, index in missing):
            return Wait.LOST
        reserved = -(-reserve_tokens // self._page_tokens) - node.end
        room = [
            max(len(host), reserved) if component.per_page else 1
            for component, host in zip(self._components, saved, strict=True)
        ]
        pages = self._take(node, missing, room)
        if pages is None:
            return Wait.NO_ROOM
        loading, own, locks = pages
        self._residence.release(request.locks)
        request.locks, request.saved = locks, None
        tail = [run[: len(host)] for run, host in zip(own, saved, strict=True)]
        request.own = [run[len(host) :] for run, host in zip(own, saved, strict=True)]
        self._clock.tick()
        self._prefixes.use(node)
        missing = lacking(self._saving.shared, node, DEVICE)
        self._loading_back.begin(request, node, missing, loading, TailPages(tail, saved))
        return None

    def _reach(self, nodes: list[Node]) -> tuple[int, int]:
        """Return up to where the device has a path, and up to where a load back may bring it.

        Incident B: to `best_match_node`, where every component accepts a match.
        """
        device, best, _ = reach(self._prefixes.needs, nodes)
        return device, best

    def _take(
        self, best: Node, missing: list[Missing], room: list[int]
    ) -> tuple[list[PageRun], list[PageRun], list[Receipt]] | None:
        """Take the pages to load into and a request's own (`room`), and lock what it will use.

        What it will use is locked and what is to be loaded is pinned before pages are taken, so that
        taking them cannot evict it.
        """
        residence = self._residence
        if not (missing or any(room)):
            nothing = [page_run() for _ in self._components]
            return nothing, nothing.copy(), residence.hold(DEVICE, best, requested=True)
        loading = [0] * len(self._components)
        for node, index in missing:
            loading[index] += self._components[index].pages_of(node.width)
        counts = [load + own for load, own in zip(loading, room, strict=True)]
        locks = residence.hold(DEVICE, best, requested=True)
        if self._prefixes.room.has_free(DEVICE, counts):
            taken = self._prefixes.room.take(DEVICE, counts)
        else:
            guards = residence.hold(DEVICE, best) + residence.hold(HOST, best)
            taken = self._prefixes.room.take(DEVICE, counts)
            residence.release(guards)
        if taken is None:
            residence.release(locks)
            return None
        parts = list(zip(taken, loading, strict=True))
        return [run[:count] for run, count in parts], [run[count:] for run, count in parts], locks

    def _loaded(self, operation: LoadBack) -> None:
        request = self._loading_back.settle(operation)
        if request is not None:
            self._checkpoints.fork(request)
        self._agenda.finish(operation, Outcome.COMPLETE)

    def _resumed(self, operation: Resume) -> None:
        request = self._loading_back.settle(operation)
        if request is not None:
            for component in self._components:
                index = component.index
                request.own[index] = operation.disown(DEVICE, index) + request.own[index]
        self._agenda.finish(operation, Outcome.COMPLETE)

    def _load_failed(self, operation: LoadBack | Resume) -> None:
        """Let no request find the source of the copy again, and let this one compute anew."""
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._saving.lose(request, Event.FAIL)
        self._loading_back.failed(operation)

    def _save_failed(self, operation: Retract) -> None:
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._saving.lose(request, Event.FAIL)
        self._agenda.stop(operation, Outcome.FAILED)

    def _admission(self, request: Request, device: int, best: int, tokens: bytes) -> Admission:
        """Return the admission of a request with `best` pages cached."""
        unit = self._page_tokens
        start, stop = request.fetched
        fetched = max(0, min(best, stop) - max(device, start))
        parts = device * unit, (best - device - fetched) * unit, fetched * unit
        told = Hit(request.id, len(tokens) // TOKEN_BYTES, *parts)
        self._outbox.notices.append(told)
        return Admission(
            device_tokens=told.device_tokens,
            host_tokens=told.host_tokens,
            storage_tokens=told.storage_tokens,
            operation=request.waits_for,
            checkpoints=self._checkpoints.stops(request, best, tokens),
        )

    def _tail(self, request: Request, computed_bytes: int) -> list[PageRun]:
        """Return what of a request's own pages, by component, holds something."""
        begun_page = int(computed_bytes > request.prefix * self._prefixes.tree.page_bytes)
        # Before the first token, the state is the engine's to begin with.
        has_state = int(computed_bytes > 0)
        return [
            request.own[component.index][: begun_page if component.per_page else has_state]
            for component in self._components
        ]

    def _require_ready(self, request: Request) -> None:
        if self.load_state(request) is not LoadState.READY:
            raise UsageError(f"request {request.id!r} is not ready; its load back has not settled")
