"""Requests of the engine: which there are, in which stage each stands, and what moves it.

A request changes its stage by an event, and `STAGES` is all that moves it. What is not listed cannot
happen: where an engine asks for it the call is refused before, so that a missing entry is a bug of
Lockstep's own.

    KNOWN     it waits for its turn, perhaps with a prefetch
    LOADING   its cached prefix is on its way to the device
    STOPPING  the load has failed, and some rank's copy may still touch pages that the engine lends
    READY     the engine computes
    SAVING    it is on its way to host memory
    SAVED     it is in host memory, and nothing of it on the device
    FAILED    as KNOWN, after a copy that has failed
    BARRED    as READY, after a copy that has failed: it computes, and loads nothing more
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum, auto
from functools import lru_cache
from hashlib import sha256

from ....errors import InternalError, UsageError
from ...protocol.notices import Hit
from ..core.journal import Journal
from ..core.misses import NOTHING_SOUGHT, Digests, Sought
from ..core.pages import PageRun
from ..tree.holds import Receipt
from ..tree.node import Node, Place
from ..tree.prefixes import Prefixes
from ..tree.tokens import TOKEN_BYTES, token_hash
from .kinds import Operation
from .lent import Unfilled


class Stage(IntEnum):
    """Where a request stands, on every rank alike; see the module."""

    KNOWN = auto()
    LOADING = auto()
    STOPPING = auto()
    READY = auto()
    SAVING = auto()
    SAVED = auto()
    FAILED = auto()
    BARRED = auto()


class Event(IntEnum):
    """The events that may move a request on."""

    ADMIT = auto()
    """Its cached prefix is on the device, and its pages are reserved."""
    LOAD = auto()
    """A copy of its cached prefix to the device begins."""
    LOADED = auto()
    STOP = auto()
    """The copy has failed, and some rank's may still run."""
    QUIET = auto()
    """No copy touches its pages any more, or only one that is waited for no longer."""
    FAIL = auto()
    """The copy has failed; the request holds nothing any more."""
    COMPUTE = auto()
    """The engine lends what the request has computed."""
    FENCE = auto()
    """The engine wants the pages back that it has lent."""
    SAVE = auto()
    """A copy of all that it has to host memory begins."""
    SAVED = auto()
    LOSE = auto()
    """The saved pages are gone."""


class LoadState(StrEnum):
    """How far an admitted request's pages have come."""

    LOADING = "loading"
    """Pages are on their way from host memory."""
    SAVING = "saving"
    """The request is on its way to host memory."""
    SAVED = "saved"
    """The request is in host memory, and nothing of it on the device; `resume` brings it back."""
    READY = "ready"
    """All pages of the prefix are on the device; the engine may compute."""
    FAILED = "failed"
    """The copy failed on some rank, and the request is not admitted any more, or goes on in the pages
    that it lends. Host pages that a load could not read are dropped, but for those that something else
    needs."""


_KNOWN, _LOADING, _STOPPING, _READY = Stage.KNOWN, Stage.LOADING, Stage.STOPPING, Stage.READY
_SAVING, _SAVED, _FAILED, _BARRED = Stage.SAVING, Stage.SAVED, Stage.FAILED, Stage.BARRED

STAGES: dict[tuple[Event, Stage], Stage] = {
    (Event.ADMIT, _KNOWN): _READY,
    (Event.ADMIT, _FAILED): _READY,
    (Event.LOAD, _KNOWN): _LOADING,
    (Event.LOAD, _FAILED): _LOADING,
    (Event.LOAD, _READY): _LOADING,
    (Event.LOAD, _SAVED): _LOADING,
    (Event.LOADED, _LOADING): _READY,
    (Event.STOP, _LOADING): _STOPPING,
    (Event.STOP, _SAVING): _SAVING,
    (Event.QUIET, _STOPPING): _BARRED,
    (Event.QUIET, _SAVING): _BARRED,
    (Event.FAIL, _LOADING): _FAILED,
    (Event.FAIL, _SAVING): _FAILED,
    (Event.COMPUTE, _KNOWN): _READY,
    (Event.COMPUTE, _READY): _READY,
    (Event.COMPUTE, _FAILED): _BARRED,
    (Event.COMPUTE, _BARRED): _BARRED,
    (Event.FENCE, _KNOWN): _KNOWN,
    (Event.FENCE, _READY): _KNOWN,
    (Event.FENCE, _FAILED): _FAILED,
    (Event.FENCE, _BARRED): _FAILED,
    (Event.SAVE, _READY): _SAVING,
    (Event.SAVE, _BARRED): _SAVING,
    (Event.SAVED, _SAVING): _SAVED,
    (Event.LOSE, _SAVED): _KNOWN,
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
    """One request: what it holds, and the operations that run for it; whoever owns the device pages."""

    id: str
    place: Place
    stage: Stage = Stage.KNOWN
    """Changed by `Requests.move` alone."""
    waits_for: int | None = None
    """The copy that it waits for."""
    prefetch: int | None = None
    """Its prefetch in flight."""
    fetched: tuple[int, int] = (0, 0)
    """Positions, in pages, that its prefetch brought from storage, until it is counted."""
    source: str = ""
    """The group that they came from, as far as is known of the last of them; empty for the store."""
    refused: bool = False
    """Whether some rank could not connect to the group that its last prefetch was to read from."""
    prefix: int = 0
    """Pages of its prefix that are in the tree, and locked for it."""
    node: Node | None = None
    """Where that prefix ends."""
    locks: Sequence[Receipt] = ()
    """Locks on the device; pins on the host while it is retracted."""
    saved: list[PageRun] | None = None
    """By component, once it is retracted: host pages that hold what is its own."""
    served_to: int = 0
    """Up to which position of its prefix `serve` has last had it backed up."""
    computed: int = 0
    """How many tokens it had computed when it was retracted."""
    sought: Sought = NOTHING_SOUGHT
    """The pages that its last prefetch and its last load were to bring, until it is counted."""

    @property
    def admitted(self) -> bool:
        """Whether it has device pages, or lends some: what it computes goes on in its place."""
        return self.stage not in _WAITING

    @property
    def load_state(self) -> LoadState | None:
        """How far its pages have come; None for one that was never admitted."""
        return _LOAD_STATES.get(self.stage)

    @property
    def device_pages(self) -> Sequence[PageRun]:
        """By component the device pages that belong to it alone; empty if there are none."""
        return ()

    def drop_device_pages(self) -> None:
        """Forget those pages, which are another's now."""

    def forget_sources(self) -> None:
        """Forget where it has its tokens from: they are counted, or of another place."""
        self.fetched, self.sought = (0, 0), NOTHING_SOUGHT


@dataclass(slots=True, eq=False)
class OwnedRequest(Request):
    """A request where the replica owns the device pages."""

    own: Sequence[PageRun] = ()
    """By component: device pages of its own, which continue the prefix; or the one slot in which a
    recurrent state is computed. Empty unless it is admitted."""
    priority: int = 0
    """Pages that it has used are evicted after those that only requests of lower priority used."""
    checkpoints: frozenset[int] = frozenset()
    """Positions, in pages, at which a recurrent state is kept beside the regular ones."""
    counted: tuple[Hit, Sequence[Digests]] | None = None
    """Its hit and missed tokens, which are reported when its load has succeeded."""
    ends: frozenset[int] = frozenset()
    """Positions, in pages, at which other requests' matches may end: where its tokens part from what
    was cached, and the end of its prompt. Kept for models with a window."""

    @property
    def device_pages(self) -> Sequence[PageRun]:
        return self.own

    def drop_device_pages(self) -> None:
        self.own = ()


@dataclass(slots=True, eq=False)
class LentRequest(Request):
    """A request where the engine owns the device pages, and lends them for copies."""

    loaded: tuple[int, int] = (0, 0)
    """Positions, in pages, that loads have brought, or bring, to lent pages."""
    saved_from: Sequence[int] = ()
    """By component, once it is retracted: the first position of its prefix that it needs."""
    unfilled: Sequence[Unfilled] = ()
    """Positions of its prefix that neither it nor a load has filled."""
    copies: frozenset[int] = frozenset()
    """Copies to and from the device pages that are lent for it; some may have ended."""

    @property
    def barred(self) -> bool:
        """Whether a copy of its has failed, and nothing has been loaded for it since."""
        return self.stage is _FAILED or self.stage is _BARRED


def require_name(what: str, name: object) -> None:
    """Raise `UsageError` for the name of a request or a pin that is no text."""
    if not isinstance(name, str):
        raise UsageError(f"the name of a {what} must be text, not {name!r}")


@lru_cache(maxsize=256)
def _shown(namespace: str) -> str:
    """Return a text for a namespace in entries that errors show, since it may be a tenant's salt."""
    return sha256(namespace.encode()).hexdigest()[:16]


class Requests:
    """The requests by name, and the places that they use."""

    def __init__(self, prefixes: Prefixes, journal: Journal, kind: type[Request]) -> None:
        """`kind` is that of all requests: it says who owns the device pages."""
        self._prefixes = prefixes
        self._journal = journal
        self._kind = kind
        self._known: dict[str, Request] = {}
        self._place = Place("")
        """The last that was asked for, of the time since the last reset: mostly there is one."""

    @property
    def generation(self) -> int:
        """How often everything was dropped by a reset."""
        return self._place.generation

    @property
    def weights_version(self) -> str | None:
        """The version of the weights that the last reset named."""
        return self._place.weights_version

    def __contains__(self, name: str) -> bool:
        """Say whether a request is known."""
        return self.get(name) is not None

    def __len__(self) -> int:
        """Return how many are known."""
        return len(self._known)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they came."""
        return iter(self._known.values())

    def get(self, name: str) -> Request | None:
        """Return a request, or None if there is no such one."""
        require_name("request", name)
        return self._known.get(name)

    def known(self, name: str) -> Request:
        """Return a request that the engine has told of."""
        request = self.get(name)
        if request is None:
            raise UsageError(f"request {name!r} is not known; prefetch, load back or hit first")
        return request

    def waiting_for(self, name: str, operation: Operation) -> Request | None:
        """Return the request if it still waits for this copy."""
        request = self._known.get(name)
        return request if request is not None and request.waits_for == operation.id else None

    def enter(self, name: str, namespace: str) -> Request:
        """Return a request, which is known from here on."""
        request = self.get(name)
        if request is None:
            self._journal.record("request", name, _shown(namespace))
            self._known[name] = request = self._kind(name, self.place(namespace))
            self._prefixes.join(request.place)
        elif request.place.namespace != namespace:
            # A tenant's salt is nobody else's business, so neither is told.
            raise UsageError(f"request {name!r} is in another namespace than the one that is given")
        return request

    def move(self, request: Request, event: Event) -> None:
        """Move a request on, if the table has that step."""
        try:
            request.stage = STAGES[event, request.stage]
        except KeyError:
            raise InternalError(
                f"request {request.id!r} cannot {event.name} while it is {request.stage.name}"
            ) from None

    def leave(self, request: Request) -> None:
        """Forget a request, which holds nothing any more."""
        self._journal.record("release", request.id)
        del self._known[request.id]
        self._prefixes.leave(request.place)

    def place(self, namespace: str) -> Place:
        """Return the place of a namespace since the last reset."""
        last = self._place
        if namespace != last.namespace:
            self._place = last = last._replace(namespace=namespace)
        return last

    def is_current(self, place: Place) -> bool:
        """Say whether a place is of the time since the last reset."""
        return place.generation == self.generation

    def renew(self, request: Request) -> None:
        """Let a request that begins anew use its namespace's place since the last reset."""
        before = request.place
        if isinstance(request, LentRequest):
            request.unfilled = ()
        if not self.is_current(before):
            request.place = self.place(before.namespace)
            request.forget_sources()
            self._prefixes.join(request.place)
            self._prefixes.leave(before)

    def reset(self, weights_version: str | None) -> None:
        """Begin another generation, to which all requests go that are not admitted yet."""
        self._journal.record("reset", self.generation + 1, weights_version)
        self._place = Place("", self.generation + 1, weights_version)
        for request in self._known.values():
            if not request.admitted:
                self.renew(request)

    def witness_tokens(self, command: str, name: str, tokens: bytes, *facts: object) -> int:
        """Let the digest cover a command, and the tokens that it brings for a request or a pin (R2).

        Returns their `token_hash`.

        Ranks whose engines have sampled other tokens of equal count are told apart by it in the next
        round, and not by an answer that differs some day.
        """
        count = len(tokens) // TOKEN_BYTES
        digest = token_hash(tokens)
        self._journal.record("tokens", command, name, count, digest, *facts)
        return digest

    def witness_pages(self, command: str, name: str, tokens: bytes, *facts: object) -> int:
        """Do as `witness_tokens` does; return the `token_hash` of the whole pages of `tokens`."""
        digest = self.witness_tokens(command, name, tokens, *facts)
        rest = len(tokens) % self._prefixes.tree.page_bytes
        return token_hash(tokens[:-rest]) if rest else digest
