"""Arrivals: requests that another group computes and this one goes on with, on the side that goes on.

The engine expects a request and hears of it again when it can be admitted: with everything that the
other group had, or with what of it could be had. What falls short is asked for again, then the other
group is asked to offer it anew. At last those who may still have whole pages of it are asked for them:
that group, unless it has withdrawn it or is heard of no more, and the own store. The rest is computed.
A request never fails for it. Every rank does the same in the same step, and `send` is called with the
same on each: one of them sends.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from ..rank_cache import RankCache
from ..replica.extent import Extent
from .control import Announce, Control, Handover, Receipt, Resend, Withdrawn
from .departures import Send, TokenArray
from .early_loads import EarlyLoads
from .manifest import HandoffManifest, HandoffTerms
from .refusal import Refusal, Refused

QUEUED_PATIENCES = 20
"""A group that lets itself be heard and computes nothing of a request is waited for so much longer."""
REFUSED_MAX = 1024
"""How many requests are remembered that are not taken, so that others can be told again."""


class Outcome(StrEnum):
    """How a request has come."""

    OK = "ok"
    """With everything, at the first time of asking."""
    REFETCHED = "refetched"
    """With everything, once it was asked for again."""
    RESENT = "resent"
    """With everything, once the other group had offered it again."""
    RECOMPUTED = "recomputed"
    """With less: the rest is computed here."""


class _Stage(Enum):
    EXPECTED = auto()
    """The other group computes; what it announces is fetched."""
    FETCHING = auto()
    """The manifest is here, and everything is being fetched."""
    AGAIN = auto()
    """What has not come is being fetched once more."""
    WAITING = auto()
    """The other group was asked to offer it again."""
    RESENT = auto()
    """What was offered again is being fetched."""
    SHORT = auto()
    """What can be had of it is being fetched; the rest is computed here."""


_OUTCOMES = {
    _Stage.FETCHING: Outcome.OK,
    _Stage.AGAIN: Outcome.REFETCHED,
    _Stage.RESENT: Outcome.RESENT,
}


@dataclass(slots=True, eq=False)
class _Arrival:
    """A request on its way in."""

    tokens: TokenArray
    namespace: str
    partner: str
    patience_ms: int
    stage: _Stage = _Stage.EXPECTED
    announced: int = 0
    asked: int = 0
    """How many tokens have been fetched, or are being so, while the other group computes."""
    come: int = 0
    """How many of them have come, and may be loaded early."""
    to_fetch: deque[tuple[int, Extent, str]] = field(default_factory=deque[tuple[int, Extent, str]])
    """What is to be fetched: so many tokens, to that extent, from there. One fetch runs at a time."""
    source: str = ""
    manifest: HandoffManifest | None = None
    is_withdrawn: bool = False
    """The other group offers nothing of it any more."""
    since_ms: int = 0
    """When it was first waited for, in agreed time; 0 while no time was agreed on."""
    heard_ms: int = 0
    """When the other group was last heard of, in agreed time; 0 while no time was agreed on."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that can be admitted with `load_back`."""

    request: str
    tokens: TokenArray
    """All that the other group had, or the prompt where nothing came of it."""
    manifest: HandoffManifest | None
    """None where the request, or the rest of it, is to be computed here."""


class Arrivals:
    """The requests that come. One for each rank of a group; driven by the engine's thread."""

    def __init__(
        self,
        cache: RankCache,
        terms: HandoffTerms,
        send: Send,
        *,
        patience_s: float = 30.0,
        early: EarlyLoads | None = None,
    ) -> None:
        """A group of which nothing was heard for `patience_s` of agreed time is not waited for.

        `early` takes what has come of a prompt on to the device, where the cache owns that.
        """
        self._cache = cache
        self._terms = terms
        self._send = send
        self._patience_ms = int(1000 * patience_s)
        self._early = early
        self._coming: dict[str, _Arrival] = {}
        self.outcomes: Counter[Outcome] = Counter()
        self.refusals: Counter[Refusal] = Counter()
        """Messages that could not be read or gone on with, by why."""
        self._refused: OrderedDict[str, str] = OrderedDict()
        """The last requests that this group does not take, and whom it has told."""

    def __contains__(self, request: str) -> bool:
        """Say whether a request is on its way in."""
        return request in self._coming

    def expect(
        self,
        request: str,
        tokens: TokenArray,
        partner: str,
        namespace: str = "",
        *,
        patience_ms: int = 0,
    ) -> None:
        """Wait for a request that the group whose inbox is at `partner` computes.

        `tokens` are those of its prompt. The manifest has to be of exactly these. `patience_ms` says
        how long to wait without a word of that group, if that is less than for all.
        """
        patience_ms = min(patience_ms or self._patience_ms, self._patience_ms)
        self._coming[request] = _Arrival(tokens, namespace, partner, patience_ms)

    def forget(self, request: str) -> None:
        """Expect a request no more; the engine aborts it in the cache."""
        arrival = self._coming.pop(request, None)
        if arrival is not None:
            self._load_no_more(request)
            self._send(arrival.partner, Receipt(request=request))

    def refuse(self, request: str, partner: str) -> None:
        """Tell the group whose inbox is at `partner`, if any, that its request is not taken."""
        if not partner:
            return
        self._refused[request] = partner
        while len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)
        self._send(partner, Withdrawn(request=request))

    def hear(self, message: Control) -> None:
        """Take a message that every rank has."""
        if not isinstance(message, Handover):
            return
        arrival = self._coming.get(message.request)
        if arrival is None:
            partner = self._refused.get(message.request)
            if partner is not None and isinstance(message, Announce | HandoffManifest):
                # It was told before it had heard of the request itself.
                self._send(partner, Withdrawn(request=message.request))
            return
        arrival.heard_ms = self._cache.inspection.agreed_ms
        match message:
            case Announce():
                arrival.announced = max(arrival.announced, message.tokens)
                arrival.source = message.source
            case HandoffManifest() if arrival.stage in (_Stage.EXPECTED, _Stage.WAITING):
                self._take(message, arrival)
            case Withdrawn() if arrival.stage in (_Stage.EXPECTED, _Stage.WAITING):
                self._compute_here(arrival, is_there=False)
            case Withdrawn():
                # What is on its way may still come; nothing more is asked for.
                arrival.is_withdrawn = True
            case _:
                pass

    def step(self) -> list[Arrived]:
        """Go on with what has come; return the requests that can be admitted now.

        Once in each step, after its verdict.
        """
        arrived: list[Arrived] = []
        if self._early is not None:
            self._early.step()
        for request, arrival in list(self._coming.items()):
            if self._moves_on(request, arrival):
                arrived.append(Arrived(request, arrival.tokens, arrival.manifest))
                del self._coming[request]
        return arrived

    def _moves_on(self, request: str, arrival: _Arrival) -> bool:
        """Take the next step with a request; say whether it can be admitted."""
        if not self._cache.prefetch_done(request):
            return False
        if arrival.to_fetch:
            self._fetch(request, arrival, *arrival.to_fetch.popleft())
            return False
        is_expected = arrival.stage is _Stage.EXPECTED
        if is_expected and arrival.come < arrival.asked and self._early is not None:
            arrival.come = arrival.asked
            self._early.came(request, arrival.tokens[: arrival.come], arrival.namespace)
        match arrival.stage:
            case _Stage.EXPECTED | _Stage.WAITING if self._is_late(arrival):
                self._compute_here(arrival, is_there=False)
            case _Stage.EXPECTED if arrival.announced > arrival.asked:
                arrival.asked = arrival.announced
                arrival.to_fetch.append((arrival.announced, Extent.KV, arrival.source))
            case _Stage.EXPECTED | _Stage.WAITING:
                pass
            case _Stage.SHORT:
                self._end(request, arrival, Outcome.RECOMPUTED)
                return True
            case _ if self._has_all(request, arrival):
                self._end(request, arrival, _OUTCOMES[arrival.stage])
                return True
            case _ if arrival.is_withdrawn:
                self._compute_here(arrival, is_there=False)
            case _Stage.FETCHING:
                arrival.stage = _Stage.AGAIN
                arrival.to_fetch.append((len(arrival.tokens), Extent.ALL, arrival.source))
            case _Stage.AGAIN:
                # The other group gets its time to answer, however long the fetches took.
                arrival.stage, arrival.manifest, arrival.heard_ms = _Stage.WAITING, None, 0
                there = self._cache.received(request, arrival.tokens, arrival.namespace)
                self._send(arrival.partner, Resend(request=request, from_token=there))
            case _Stage.RESENT:
                self._compute_here(arrival, is_there=True)
        return False

    def _take(self, manifest: HandoffManifest, arrival: _Arrival) -> None:
        """Begin to fetch everything that a manifest tells of, unless it is of something else."""
        try:
            self._terms.require(manifest)
            _, tail_key = self._cache.keys(arrival.tokens, arrival.namespace)
            if manifest.tokens != len(arrival.tokens) or manifest.tail_key != tail_key:
                raise Refused(
                    Refusal.NAMESPACE,
                    f"the manifest of request {manifest.request!r} is of other tokens than those that"
                    " it was expected with",
                )
        except Refused as refused:
            self.refusals[refused.refusal] += 1
            self._compute_here(arrival, is_there=False)
            return
        arrival.stage = _Stage.RESENT if arrival.stage is _Stage.WAITING else _Stage.FETCHING
        arrival.manifest, arrival.source = manifest, manifest.source
        arrival.to_fetch.append((manifest.tokens, Extent.ALL, manifest.source))

    def _compute_here(self, arrival: _Arrival, *, is_there: bool) -> None:
        """Fetch what a match can use of the prompt, and let the engine compute the rest.

        `is_there` says whether the other group's memory still has what it can be used for.
        """
        arrival.stage, arrival.manifest = _Stage.SHORT, None
        sources = (arrival.source, "") if is_there and arrival.source else ("",)
        length = len(arrival.tokens)
        arrival.to_fetch = deque((length, Extent.PAGES, source) for source in sources)

    def _end(self, request: str, arrival: _Arrival, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        self._load_no_more(request)
        self._send(arrival.partner, Receipt(request=request))

    def _load_no_more(self, request: str) -> None:
        """Leave what is not on the device yet to the request's admission."""
        if self._early is not None:
            self._early.forget(request)

    def _fetch(
        self, request: str, arrival: _Arrival, tokens: int, extent: Extent, source: str
    ) -> None:
        self._cache.prefetch(
            request, arrival.tokens[:tokens], arrival.namespace, extent=extent, source=source
        )

    def _has_all(self, request: str, arrival: _Arrival) -> bool:
        there = self._cache.received(request, arrival.tokens, arrival.namespace)
        return there == len(arrival.tokens)

    def _is_late(self, arrival: _Arrival) -> bool:
        now_ms = self._cache.inspection.agreed_ms
        arrival.heard_ms = arrival.heard_ms or now_ms
        arrival.since_ms = arrival.since_ms or now_ms
        waited_ms = now_ms - arrival.since_ms
        if not arrival.announced and waited_ms > QUEUED_PATIENCES * arrival.patience_ms:
            return True
        return now_ms - arrival.heard_ms > arrival.patience_ms
