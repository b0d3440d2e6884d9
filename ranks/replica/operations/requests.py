"""The engine's requests: their stages, and the events that change a stage.

`STAGES` lists all transitions. Invalid calls of the engine are refused earlier, so a transition missing
from the table is a bug in Lockstep.

    KNOWN     the request waits, perhaps with a prefetch
    LOADING   its cached prefix is being copied to the device
    STOPPING  the load has failed, and some rank's copy may still touch pages that the engine lends
    READY     the engine computes
    SAVING    its pages are being copied to host memory
    SAVED     its pages are in host memory, and none on the device
    FAILED    like KNOWN, after a failed copy
    BARRED    like READY, after a failed copy: the request computes, and loads nothing more
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum, auto
from functools import lru_cache
from hashlib import sha256

from ....errors import InternalError, UsageError
from ...protocol.events import Hit
from ..core.journal import Journal
from ..core.misses import NOTHING_SOUGHT, Digests, Sought
from ..core.pages import PageRun
from ..tree.node import Node, TreeIdentity
from ..tree.prefixes import Prefixes
from ..tree.ref_counts import LockHandle
from ..tree.tokens import TOKEN_BYTES, token_hash
from .kinds import Operation
from .lent import Unfilled


class Stage(IntEnum):
    """The stage of a request, equal on every rank. The module's docstring lists the stages."""

    KNOWN = auto()
    LOADING = auto()
    STOPPING = auto()
    READY = auto()
    SAVING = auto()
    SAVED = auto()
    FAILED = auto()
    BARRED = auto()


class RequestEvent(IntEnum):
    """The events that change a request's stage."""

    ADMIT = auto()
    """The cached prefix is on the device, and the request's pages are reserved."""
    LOAD = auto()
    """A copy of the cached prefix to the device begins."""
    LOADED = auto()
    STOP = auto()
    """The copy has failed, and may still run on some rank."""
    QUIET = auto()
    """No copy touches the request's pages any more, except quarantined copies."""
    FAIL = auto()
    """The copy has failed; the request holds no pages any more."""
    COMPUTE = auto()
    """The engine lends the pages that the request has computed."""
    FENCE = auto()
    """The engine wants to overwrite the pages that it has lent."""
    SAVE = auto()
    """A copy of all the request's pages to host memory begins."""
    SAVED = auto()
    LOSE = auto()
    """The pages of a retracted request are lost."""


class LoadState(StrEnum):
    """The state of the copies of an admitted request's pages."""

    LOADING = "loading"
    """Pages are being copied from host memory."""
    SAVING = "saving"
    """The request's pages are being copied to host memory."""
    SAVED = "saved"
    """The request's pages are in host memory, and none on the device; `resume` loads them back."""
    READY = "ready"
    """All pages of the prefix are on the device; the engine may compute."""
    FAILED = "failed"
    """The copy failed on some rank.

    If the replica owns the device pages, the request is no longer admitted. If the engine lends them,
    the request computes in them. Host pages that a load could not read are dropped, unless another
    request needs them.
    """


_KNOWN, _LOADING, _STOPPING, _READY = Stage.KNOWN, Stage.LOADING, Stage.STOPPING, Stage.READY
_SAVING, _SAVED, _FAILED, _BARRED = Stage.SAVING, Stage.SAVED, Stage.FAILED, Stage.BARRED

STAGES: dict[tuple[RequestEvent, Stage], Stage] = {
    (RequestEvent.ADMIT, _KNOWN): _READY,
    (RequestEvent.ADMIT, _FAILED): _READY,
    (RequestEvent.LOAD, _KNOWN): _LOADING,
    (RequestEvent.LOAD, _FAILED): _LOADING,
    (RequestEvent.LOAD, _READY): _LOADING,
    (RequestEvent.LOAD, _SAVED): _LOADING,
    (RequestEvent.LOADED, _LOADING): _READY,
    (RequestEvent.STOP, _LOADING): _STOPPING,
    (RequestEvent.STOP, _SAVING): _SAVING,
    (RequestEvent.QUIET, _STOPPING): _BARRED,
    (RequestEvent.QUIET, _SAVING): _BARRED,
    (RequestEvent.FAIL, _LOADING): _FAILED,
    (RequestEvent.FAIL, _SAVING): _FAILED,
    (RequestEvent.COMPUTE, _KNOWN): _READY,
    (RequestEvent.COMPUTE, _READY): _READY,
    (RequestEvent.COMPUTE, _FAILED): _BARRED,
    (RequestEvent.COMPUTE, _BARRED): _BARRED,
    (RequestEvent.FENCE, _KNOWN): _KNOWN,
    (RequestEvent.FENCE, _READY): _KNOWN,
    (RequestEvent.FENCE, _FAILED): _FAILED,
    (RequestEvent.FENCE, _BARRED): _FAILED,
    (RequestEvent.SAVE, _READY): _SAVING,
    (RequestEvent.SAVE, _BARRED): _SAVING,
    (RequestEvent.SAVED, _SAVING): _SAVED,
    (RequestEvent.LOSE, _SAVED): _KNOWN,
}

_LOAD_STATES = {
    _LOADING: LoadState.LOADING,
    _STOPPING: LoadState.LOADING,
    _READY: LoadState.READY,
    _SAVING: LoadState.SAVING,
    _SAVED: LoadState.SAVED,
    _FAILED: LoadState.FAILED,
    _BARRED: LoadState.FAILED,
}
_WAITING = (_KNOWN, _FAILED)


@dataclass(slots=True, eq=False)
class Request:
    """One request: its pages, locks and operations, for owned and lent device pages."""

    id: str
    place: TreeIdentity
    stage: Stage = Stage.KNOWN
    """The request's stage; only `Requests.move` changes it."""
    waits_for: int | None = None
    """The id of the copy that the request waits for, or None."""
    prefetch: int | None = None
    """The id of the request's prefetch in flight, or None."""
    fetched: tuple[int, int] = (0, 0)
    """First and end position of the pages that prefetches read, until a hit event counts them."""
    source: str = ""
    """The group from which the last prefetched pages were read; empty for the store or if unknown."""
    refused: bool = False
    """Whether some rank could not connect to the group that the last prefetch was to read from."""
    prefix: int = 0
    """Number of pages of the request's prefix that are in the tree and locked for the request."""
    node: Node | None = None
    """The node at which the request's cached prefix ends."""
    locks: Sequence[LockHandle] = ()
    """Lock handles of the prefix: locks on the device, or pins on the host while retracted."""
    saved: list[PageRun] | None = None
    """By component, while retracted: host pages that belong to the request alone."""
    served_to: int = 0
    """The end position of the prefix for which `serve` last started a backup."""
    computed: int = 0
    """How many tokens the request had computed when it was retracted."""
    sought: Sought = NOTHING_SOUGHT
    """Pages that the last prefetch and load looked for, until the request's misses are counted."""

    @property
    def admitted(self) -> bool:
        """Whether the request has or lends device pages. A reset leaves such a request in its tree."""
        return self.stage not in _WAITING

    @property
    def load_state(self) -> LoadState | None:
        """The state of the request's page copies; None for a request that was never admitted."""
        return _LOAD_STATES.get(self.stage)

    @property
    def device_pages(self) -> Sequence[PageRun]:
        """By component, the device pages that belong to the request alone; empty if there are none."""
        return ()

    def drop_device_pages(self) -> None:
        """Forget the request's device pages, because they have a new owner."""

    def forget_sources(self) -> None:
        """Clear `fetched` and `sought`: their pages are counted, or the request has a new tree."""
        self.fetched, self.sought = (0, 0), NOTHING_SOUGHT


@dataclass(slots=True, eq=False)
class OwnedRequest(Request):
    """A request whose device pages the replica owns."""

    own: Sequence[PageRun] = ()
    """By component: device pages of the request after the prefix, or its working state slot.

    Empty unless the request is admitted.
    """
    priority: int = 0
    """Priority of the request. Pages that it uses are evicted after pages used only with lower
    priority."""
    checkpoints: frozenset[int] = frozenset()
    """Page positions at which a recurrent state is kept in addition to the regular checkpoints."""
    counted: tuple[Hit, Sequence[Digests]] | None = None
    """A hit event and digests of missed pages. The event is published, and the digests are recorded,
    when the request's load succeeds."""
    ends: frozenset[int] = frozenset()
    """Page positions at which matches of other requests may end; used for models with a window.

    These are where the tokens diverge from the cached prefix, and the end of the prompt.
    """

    @property
    def device_pages(self) -> Sequence[PageRun]:
        return self.own

    def drop_device_pages(self) -> None:
        self.own = ()


@dataclass(slots=True, eq=False)
class LentRequest(Request):
    """A request whose device pages the engine owns and lends for copies."""

    loaded: tuple[int, int] = (0, 0)
    """First and end position of the pages that loads have copied, or are copying, to lent pages."""
    saved_from: Sequence[int] = ()
    """By component, while retracted: the position in the prefix from which to restore the request."""
    unfilled: Sequence[Unfilled] = ()
    """Positions of the prefix at which the lent device pages have no valid contents, because neither
    the request nor a load has filled them."""
    copies: frozenset[int] = frozenset()
    """Ids of copies to and from the request's lent device pages; some may have finished."""

    @property
    def copy_failed(self) -> bool:
        """Whether a copy of the request's pages has failed and nothing has been loaded since."""
        return self.stage is _FAILED or self.stage is _BARRED


def require_name(what: str, name: object) -> None:
    """Raise `UsageError` if the name of a request or pin is not a string."""
    if not isinstance(name, str):
        raise UsageError(f"the name of a {what} must be text, not {name!r}")


@lru_cache(maxsize=256)
def _shown(namespace: str) -> str:
    """Return a hash to show in errors for a namespace, which may be a tenant's secret salt."""
    return sha256(namespace.encode()).hexdigest()[:16]


class Requests:
    """The requests by name, and the identity of each namespace's tree since the last cache reset."""

    def __init__(self, prefixes: Prefixes, journal: Journal, kind: type[Request]) -> None:
        """`kind` is the class of request to create: `OwnedRequest` or `LentRequest`."""
        self._prefixes = prefixes
        self._journal = journal
        self._kind = kind
        self._known: dict[str, Request] = {}
        self._place = TreeIdentity("")
        """The tree identity that `place` returned last, cached because there is usually one namespace.

        Its generation and weights version are those of the last reset.
        """

    @property
    def generation(self) -> int:
        """The number of cache resets so far."""
        return self._place.generation

    @property
    def weights_version(self) -> str | None:
        """The weights version that the last reset named."""
        return self._place.weights_version

    def __contains__(self, name: str) -> bool:
        """Return whether there is a request of this name."""
        return self.get(name) is not None

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._known)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order of arrival."""
        return iter(self._known.values())

    def get(self, name: str) -> Request | None:
        """Return the request of this name, or None."""
        require_name("request", name)
        return self._known.get(name)

    def known(self, name: str) -> Request:
        """Return the request of this name; raise `UsageError` if there is none."""
        request = self.get(name)
        if request is None:
            raise UsageError(
                f"request {name!r} is not known; call prefetch, load_back or match_host first"
            )
        return request

    def waiting_for(self, name: str, operation: Operation) -> Request | None:
        """Return a request if it still waits for the given copy, else None."""
        request = self._known.get(name)
        return request if request is not None and request.waits_for == operation.id else None

    def enter(self, name: str, namespace: str) -> Request:
        """Return the request of this name; create it if there is none.

        Raises `UsageError` if there is one in another namespace.
        """
        request = self.get(name)
        if request is None:
            self._journal.record("request", name, _shown(namespace))
            self._known[name] = request = self._kind(name, self.place(namespace))
            self._prefixes.join(request.place)
        elif request.place.namespace != namespace:
            # A namespace may be a tenant's secret salt, so the message names no namespace.
            raise UsageError(f"request {name!r} is in another namespace than the one that is given")
        return request

    def move(self, request: Request, event: RequestEvent) -> None:
        """Change a request's stage; raise `InternalError` if the table has no such transition."""
        try:
            request.stage = STAGES[event, request.stage]
        except KeyError:
            raise InternalError(
                f"request {request.id!r} cannot {event.name} while it is {request.stage.name}"
            ) from None

    def leave(self, request: Request) -> None:
        """Forget a request that holds no pages, locks or pins any more."""
        self._journal.record("release", request.id)
        del self._known[request.id]
        self._prefixes.leave(request.place)

    def place(self, namespace: str) -> TreeIdentity:
        """Return the identity of the tree that a namespace uses since the last cache reset."""
        last = self._place
        if namespace != last.namespace:
            self._place = last = last._replace(namespace=namespace)
        return last

    def is_current(self, place: TreeIdentity) -> bool:
        """Return whether a tree belongs to the generation since the last cache reset."""
        return place.generation == self.generation

    def renew(self, request: Request) -> None:
        """Move a request to its namespace's current tree, when it computes again from the start."""
        before = request.place
        if isinstance(request, LentRequest):
            request.unfilled = ()
        if not self.is_current(before):
            request.place = self.place(before.namespace)
            request.forget_sources()
            self._prefixes.join(request.place)
            self._prefixes.leave(before)

    def reset(self, weights_version: str | None) -> None:
        """Begin a new cache generation, and move to it every request that is not admitted yet."""
        self._journal.record("reset", self.generation + 1, weights_version)
        self._place = TreeIdentity("", self.generation + 1, weights_version)
        for request in self._known.values():
            if not request.admitted:
                self.renew(request)

    def digest_tokens(self, command: str, name: str, tokens: bytes, *facts: object) -> int:
        """Add a command, its tokens and `facts` to the digest (R2); return the tokens' `token_hash`.

        `name` is the command's request or pin. Because of the digest, the next round detects ranks
        whose engines sampled different tokens.
        """
        count = len(tokens) // TOKEN_BYTES
        digest = token_hash(tokens)
        self._journal.record("tokens", command, name, count, digest, *facts)
        return digest

    def digest_pages(self, command: str, name: str, tokens: bytes, *facts: object) -> int:
        """Do the same as `digest_tokens`, but return the `token_hash` of the whole pages only."""
        digest = self.digest_tokens(command, name, tokens, *facts)
        rest = len(tokens) % self._prefixes.tree.page_bytes
        return token_hash(tokens[:-rest]) if rest else digest
