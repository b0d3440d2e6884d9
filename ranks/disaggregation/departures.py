"""Departures: requests that a group computes and another goes on with, on the side that computes.

The engine says how far a request is; here it is offered, the other group is told how much it can have
by now, and once the request is saved it gets the manifest. Every rank does the same in the same step,
and `send` is called with the same on each: one of them sends.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..rank_cache import RankCache
from .control import Announce, Control, Handover, Receipt, Resend, Withdrawn
from .manifest import HandoffManifest, HandoffTerms, PoolContents
from .refusal import Refusal

TokenArray = npt.NDArray[np.int32]
"""Token ids. They are kept as they are given, so they must not change."""

AGAIN_MS_MIN = 500
"""No group is told more often, in agreed time, that a request is still here."""
_A_PATIENCE = 3
"""Who waits for a request is told of it so many times before it gives up."""

Send = Callable[[str, Control], None]
"""Sends a message to the inbox at an address; returns at once, and promises nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn:
    """What the group that goes on with a request has to know beside what it fetches."""

    first_token: int
    """The token that follows those that were computed."""
    sampling: bytes = b""
    speculation: bytes = b""
    metadata: bytes = b""


@dataclass(slots=True, eq=False)
class _Departure:
    """A request on its way out."""

    to: str
    namespace: str
    again_ms: int
    """When it is told again, though there is nothing new: it takes a group that is silent for dead."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Those that it has computed and published."""
    given: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """How many of them can be had, each with the round that proves it: a rank may be slower than this
    one to let others have what all have agreed on, and has done so when it votes next."""
    there: int = 0
    """How many of them every rank lets others have."""
    told: int = 0
    """How many of them the other group has been told of."""
    told_ms: int = 0
    """When it was told last, in agreed time."""
    goes_on: GoesOn | None = None
    """Set once it is saved with all of its tokens."""
    is_complete: bool = False
    """The other group has been sent the manifest."""
    until_ms: int = 0
    """When nobody waits any more for a receipt, or for more of it to go out, in agreed time; 0 while no
    time was agreed on."""


class Departures:
    """The requests that leave. One for each rank of a group; driven by the engine's thread."""

    def __init__(
        self,
        cache: RankCache,
        terms: HandoffTerms,
        send: Send,
        *,
        directly: bool,
        ttl_s: float = 60.0,
        patience_s: float = 15.0,
    ) -> None:
        """`directly` serves pages out of host memory; otherwise they go by the store.

        An offer that nobody gives a receipt for ends after `ttl_s`, and so does one that does not come
        any further in so long. Other groups wait for `patience_s` at least without a word of this one.
        """
        self._cache = cache
        self._terms = terms
        self._send = send
        self._source = cache.serving_uri if directly else ""
        self._ttl_s = ttl_s
        self._patience_ms = int(1000 * patience_s)
        self._leaving: dict[str, _Departure] = {}
        self.outcomes: Counter[str] = Counter()
        """How many have ended: `received`, `expired`, `withdrawn`."""
        self.refusals: Counter[Refusal] = Counter()
        """Messages that could not be read, by why."""

    def __contains__(self, request: str) -> bool:
        """Say whether a request is on its way out."""
        return request in self._leaving

    def begin(self, request: str, to: str, namespace: str = "", *, patience_ms: int = 0) -> None:
        """Let a request that is taken here go on in the group whose inbox is at `to`.

        That group waits for `patience_ms` at most without a word; 0 for as long as all do.
        """
        patience_ms = min(patience_ms or self._patience_ms, self._patience_ms)
        again_ms = max(AGAIN_MS_MIN, patience_ms // _A_PATIENCE)
        self._leaving[request] = _Departure(to, namespace, again_ms)

    def computed(self, request: str, tokens: TokenArray) -> None:
        """Note that these are published (`insert`); whole pages of them can travel from now on."""
        departure = self._leaving[request]
        departure.tokens, departure.until_ms = tokens, 0

    def saved(self, request: str, tokens: TokenArray, goes_on: GoesOn) -> None:
        """Note that the request is SAVED (`retract`) with all that it has computed here."""
        departure = self._leaving[request]
        # What was there before was whole pages, of which there may be as many.
        departure.tokens, departure.goes_on, departure.there = tokens, goes_on, 0
        departure.until_ms = 0
        departure.given.clear()

    def hear(self, message: Control) -> list[str]:
        """Take a message that every rank has; return the requests that may be released."""
        if not isinstance(message, Handover):
            return []
        departure = self._leaving.get(message.request)
        if departure is None:
            return []
        match message:
            case Receipt():
                return [self._end(message.request, "received")]
            case Withdrawn():
                return [self._end(message.request, "withdrawn")]
            case Resend() if departure.is_complete:
                self._cache.doubt(message.request)
                departure.is_complete, departure.there, departure.until_ms = False, 0, 0
                departure.given.clear()
            case _:
                pass
        return []

    def refuse(self, request: str, to: str) -> None:
        """Tell the group whose inbox is at `to` that a request of which it waits is not taken here."""
        self._send(to, Withdrawn(request=request))

    def withdraw(self, request: str) -> None:
        """Tell the other group that a request ends here; the engine releases it."""
        departure = self._leaving.get(request)
        if departure is not None:
            self._send(departure.to, Withdrawn(request=request))
            self._end(request, "withdrawn")

    def step(self) -> list[str]:
        """Offer what is new, and tell of it; return the requests that nobody will fetch any more.

        Once in each step, after its verdict. Those that are returned are FAILED, or are to be released.
        """
        over: list[str] = []
        now_ms = self._cache.inspection.agreed_ms
        for request, departure in list(self._leaving.items()):
            if not departure.is_complete:
                self._offer(request, departure)
                if now_ms - departure.told_ms > departure.again_ms:
                    self._announce(request, departure)
            if not departure.until_ms:
                # What waits for its turn to be computed holds nothing, and may wait.
                begun = now_ms and len(departure.tokens)
                departure.until_ms = now_ms + int(1000 * self._ttl_s) if begun else 0
            elif now_ms > departure.until_ms:
                self._send(departure.to, Withdrawn(request=request))
                over.append(self._end(request, "expired"))
        return over

    def _end(self, request: str, outcome: str) -> str:
        del self._leaving[request]
        self.outcomes[outcome] += 1
        return request

    def _offer(self, request: str, departure: _Departure) -> None:
        tokens, seen = departure.tokens, self._cache.inspection
        if len(tokens) <= departure.told and departure.goes_on is None:
            return
        while departure.given and departure.given[0][0] <= seen.rounds - seen.round_pending:
            _, departure.there = departure.given.popleft()
            departure.until_ms = 0
        there = departure.there
        if departure.goes_on is not None and there == len(tokens):
            departure.is_complete, departure.until_ms = True, 0
            self._send(departure.to, self._manifest(request, departure, departure.goes_on))
            return
        if there > departure.told:
            departure.told = there
            self._announce(request, departure)
        if self._source:
            given = self._cache.serve(request, tokens, ttl_s=self._ttl_s)
        else:
            given = self._cache.offer(request, tokens)
        if given > max([there, *(each for _, each in departure.given)]):
            departure.given.append((seen.rounds + 1, given))

    def _announce(self, request: str, departure: _Departure) -> None:
        departure.told_ms = self._cache.inspection.agreed_ms
        told = Announce(request=request, tokens=departure.told, source=self._source)
        self._send(departure.to, told)

    def _manifest(self, request: str, departure: _Departure, goes_on: GoesOn) -> HandoffManifest:
        tokens, namespace = departure.tokens, departure.namespace
        end_key, tail_key = self._cache.keys(tokens, namespace)
        whole, rest = divmod(len(tokens), self._cache.config.layout.page_tokens)
        pools = [
            PoolContents(
                pool=each.pool,
                first_page=each.needed_from(whole) if each.per_page else whole,
                end_page=whole,
                tail=bool(rest) if each.per_page else len(tokens) > 0,
            )
            for each in self._cache.inspection.prefixes.components
        ]
        return HandoffManifest(
            request=request,
            namespace_digest=self._terms.namespace_digest,
            namespace=namespace,
            weights_version=self._terms.weights_version,
            layout_fingerprint=self._terms.layout_fingerprint,
            tokens=len(tokens),
            end_key=end_key,
            tail_key=tail_key,
            pools=tuple(pools),
            first_token=goes_on.first_token,
            sampling=goes_on.sampling,
            speculation=goes_on.speculation,
            metadata=goes_on.metadata,
            source=self._source,
        )
