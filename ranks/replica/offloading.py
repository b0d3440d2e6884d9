"""What a request does with the cache where the engine owns the device pages.

The engine lends pages of a request for copies: it names them in a command, and leaves them as they
are until the copies have ended on every rank. To the replica they are opaque. They go into the order
and into nothing else, since they may differ between ranks, and the digest must not.

    before it computes   `hit` says how much host memory can bring, `load` brings it
    after it computed    `back_up` copies whole pages to the host
    before it overwrites `fence` ends the backups that read the request's pages, on this rank
    at the end           `release` says whether its pages are free; if not, `take_freed` will name it
"""

from ...coordinator.operation import Kind, Phase
from ...errors import UsageError
from ..orders import Fence
from .backing_up import BackingUp
from .loading_back import LoadingBack
from .matching import match
from .operations import Copy
from .pages import PageRun
from .request import Request
from .serving import LoadState
from .state import ReplicaState
from .tree import HOST, Node


class Offloading:
    """Brings pages to the engine's device pages and takes copies of them."""

    def __init__(
        self, state: ReplicaState, loading_back: LoadingBack, backing_up: BackingUp
    ) -> None:
        self._state = state
        self._loading_back = loading_back
        self._backing_up = backing_up
        self.leaving: dict[str, set[int]] = {}
        """Requests that were released, and the copies that still touch their device pages."""

    def hit(self, request: Request, tokens: bytes, device_tokens: int) -> int:
        """Return how many tokens host memory can bring beyond `device_tokens`. Reads only.

        Nothing for a request whose load failed once: it computes, and does not loop.
        """
        if request.load_failed:
            return 0
        return max(0, match(self._state, request.place, tokens).host_tokens - device_tokens)

    def require_loadable(
        self, request: Request, tokens: bytes, start_tokens: int, pages: PageRun
    ) -> None:
        """Raise `UsageError` for a load that was not promised or has no place. Reads only."""
        state = self._state
        unit = state.config.page_tokens
        first, last = start_tokens // unit, state.tree.whole_pages(tokens)
        if start_tokens % unit or not 0 <= first < last or last - first != len(pages):
            raise UsageError(
                f"request {request.id!r} lends {len(pages)} device pages for the pages {first} to"
                f" {last} of {unit} tokens each, from token {start_tokens}"
            )
        self._require_no_load(request)
        found = self.hit(request, tokens, 0) // unit
        if found < last:
            raise UsageError(
                f"request {request.id!r} loads {last} pages, and host memory has {found}; ask `hit`"
                " in the same step"
            )

    def load(self, request: Request, tokens: bytes, start_tokens: int, pages: PageRun) -> None:
        """Copy the pages of `tokens` from `start_tokens` on to the device pages that are lent."""
        state = self._state
        first = start_tokens // state.config.page_tokens
        root = state.root(request.place)
        nodes = state.walk_to(root, tokens)
        if first:
            state.walk_to(root, tokens[: first * state.tree.page_bytes])
            nodes = [node for node in self._path(nodes[-1]) if node.start >= first]
        state.tick()
        state.use(nodes[-1])
        request.admitted = True
        missing = [(node, 0) for node in nodes]
        number = self._loading_back.begin(request, nodes[-1], missing, [pages])
        request.copies.add(number)

    def load_state(self, request: Request) -> LoadState:
        """Say whether the request's load is over on every rank.

        A load that failed is told of only once no rank's copy touches the lent pages any more.
        """
        if request.load is not None:
            return LoadState.LOADING
        return LoadState.FAILED if request.load_failed else LoadState.READY

    def loaded(self, operation: Copy) -> None:
        """Apply a load that has ended on every rank."""
        self._loading_back.loaded(operation)
        self._loading_back.finish(operation)

    def load_failed(self, operation: Copy) -> None:
        """Apply a load that failed on some rank; the request waits until all copies are quiet."""
        request = self._loading_back.request_of(operation)
        if request is not None:
            request.load_failed = True
        self._loading_back.failed(operation)

    def require_lent(self, name: str, tokens: bytes, pages: PageRun) -> None:
        """Raise `UsageError` if a request lends too few pages for a backup. Reads only."""
        count = self._state.tree.whole_pages(tokens)
        if count > len(pages):
            raise UsageError(
                f"request {name!r} lends {len(pages)} device pages for {count} pages of tokens"
            )

    def back_up(self, request: Request, tokens: bytes, pages: PageRun) -> int:
        """Copy to the host what of `tokens` is not there; return how many tokens will be then.

        `pages` are the device pages of the whole prefix, which belong to the request until its
        copies have ended.
        """
        state = self._state
        count = state.tree.whole_pages(tokens)
        self._require_no_load(request)
        state.witness_tokens("back up", request.id, tokens)
        request.admitted = True
        if not count or not state.config.host_pages:
            return 0
        step = state.tree.page_bytes
        tokens = tokens[: count * step]
        root = state.root(request.place)
        state.tick()
        nodes = state.walk_to(root, tokens)
        node = nodes[-1] if nodes else root
        if node.end < count:
            node = state.add(node, tokens[node.end * step :])
        # Newer than before whatever happens, so that a full host does not evict what is in use.
        state.use(node)
        state.journal.record("lend", request.id, count)
        number = self._backing_up.write_through(node, (request.id, pages))
        if number is not None:
            request.copies.add(number)
        last = self._covered(node)
        state.residence.prune(node)
        return last * state.config.page_tokens

    def fence(self, request: Request) -> None:
        """Let the engine overwrite the request's pages: its copies end here or vote failed.

        The request goes on as one that has computed nothing.
        """
        state = self._state
        self._require_no_load(request)
        copies = self._in_flight(request.copies)
        request.copies.clear()
        request.admitted = False
        state.journal.record("fence", request.id, len(copies))
        if copies:
            timeout_s = state.config.timeouts.fence_s
            state.orders.append(Fence(tuple(sorted(copies)), timeout_s))
        state.move(request)

    def touching(self, name: str | None) -> tuple[int, ...]:
        """Return the copies that touch pages lent by a request, or by any. Reads only.

        Also by one that was released, and whose pages are not free yet.
        """
        table = self._state.operations.in_flight
        if name is None:
            return tuple(number for number, each in table.items() if isinstance(each, Copy))
        request = self._state.requests.get(name)
        copies = self.leaving.get(name, set()) if request is None else request.copies
        return tuple(sorted(self._in_flight(copies)))

    def release(self, request: Request) -> bool:
        """Forget a request; say whether its device pages are free on every rank."""
        state = self._state
        copies = self._in_flight(request.copies)
        state.journal.record("release", request.id)
        state.leave(request)
        if copies:
            self.leaving[request.id] = copies
        return not copies

    @property
    def frees(self) -> bool:
        """Whether some released request's device pages are free, or will be without a command.

        Those of a copy that is quarantined may never be.
        """
        return any(not self._stuck(copies) for copies in self.leaving.values())

    @property
    def waits(self) -> bool:
        """Whether some released request's device pages are not free yet, and will be."""
        return any(
            self._in_flight(copies) and not self._stuck(copies) for copies in self.leaving.values()
        )

    def take_freed(self) -> list[str]:
        """Return the released requests whose device pages have become free on every rank."""
        freed = [name for name, copies in self.leaving.items() if not self._in_flight(copies)]
        for name in freed:
            del self.leaving[name]
        return freed

    def quiet(self, operation: Copy) -> None:
        """A load that failed has become quiet: its request may go on."""
        if operation.kind is Kind.LOAD_BACK:
            request = self._loading_back.request_of(operation)
            if request is not None:
                request.load = None

    def _require_no_load(self, request: Request) -> None:
        if request.load is not None:
            raise UsageError(f"request {request.id!r} has a load in flight; wait for it")

    def _stuck(self, copies: set[int]) -> bool:
        table = self._state.operations.in_flight
        return any(table[each].phase is Phase.QUARANTINED for each in self._in_flight(copies))

    def _in_flight(self, copies: set[int]) -> set[int]:
        return {number for number in copies if number in self._state.operations.in_flight}

    def _path(self, node: Node) -> list[Node]:
        return node.path_down()

    def _covered(self, node: Node) -> int:
        """Return the position up to which the path is on the host, or on its way there."""
        end = 0
        for each in self._path(node):
            if each.values[HOST][0] is None and not self._backing_up.comes_to(each):
                break
            end = each.end
        return end
