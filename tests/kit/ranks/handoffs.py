"""Programs of ranks that hand requests over: one computes and lets go, the other takes up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.ranks.agreed_pools import namespace_of
from lockstep.ranks.cache import Cache
from lockstep.ranks.disaggregation.arrivals import Arrivals, Arrived, Outcome
from lockstep.ranks.disaggregation.control import Control, decode, encode
from lockstep.ranks.disaggregation.departures import Departures, GoesOn
from lockstep.ranks.disaggregation.manifest import HandoffTerms
from lockstep.ranks.replica.answers import Admission
from lockstep.ranks.replica.requests import LoadState
from lockstep.small_engine.contents import KeyedTokens
from lockstep.small_engine.forward_pass import ForwardPass, TokenSpan
from tests.kit.ranks.served_group import STEPS_MAX, ServedGroup

FIRST_TOKEN = 4711

Tamper = Callable[[Control], Control | None]
"""Changes a message on its way, or loses it."""


def terms_of(cache: Cache) -> HandoffTerms:
    return HandoffTerms.of(namespace_of(cache.config))


class Post:
    """Delivers messages between two groups; of each group rank 0 sends."""

    def __init__(self, groups: dict[str, ServedGroup], tamper: Tamper = lambda message: message):
        self._groups = groups
        self._tamper = tamper

    def sender(self, cache: Cache) -> Callable[[str, Control], None]:
        def send(to: str, message: Control) -> None:
            changed = self._tamper(message) if cache.rank == 0 else None
            if changed is not None:
                self._groups[to].post(encode(changed))

        return send


@dataclass(frozen=True)
class Reception:
    """How a request has come to one rank, and how many of its pages were wrong once it was whole."""

    cached_tokens: int
    wrong_pages: int
    outcome: Outcome
    first_token: int | None
    refusals: tuple[str, ...]


def steps(cache: Cache, arrive: Callable[[Control], object], done: Callable[[], bool]) -> None:
    """Step until something is done, and hear what comes."""
    for _ in range(STEPS_MAX):
        if done():
            return
        cache.step(idle_s=0.002)
        for raw in cache.messages():
            arrive(decode(raw))
    raise AssertionError("what was waited for did not come")


def compute_and_leave(
    name: str, tokens: KeyedTokens, chunks: Sequence[int], post: Post, *, directly: bool
) -> Callable[[Cache, ForwardPass], dict[str, int]]:
    """Return the program of a rank that computes a prompt in chunks, and lets it go to `decode`."""
    ids = tokens.ids

    def program(cache: Cache, forward: ForwardPass) -> dict[str, int]:
        departures = Departures(
            cache, terms_of(cache), post.sender(cache), directly=directly, ttl_s=20.0
        )
        cache.load_back(name, ids[:0], reserve_tokens=len(ids))
        departures.begin(name, "decode")

        def turn() -> bool:
            for gone in departures.step():
                cache.release(gone)
            return True

        for start, stop in pairwise((0, *chunks, len(ids))):
            forward.compute([TokenSpan(request=name, tokens=tokens, start=start, stop=stop)])
            forward.begin_page(name, tokens, stop)
            cache.insert(name, ids[:stop], final=False)
            departures.computed(name, ids[:stop])
            steps(cache, departures.hear, turn)
        assert cache.retract(name, ids)
        steps(cache, departures.hear, lambda: cache.load_state(name) is LoadState.SAVED)
        departures.saved(name, ids, GoesOn(first_token=FIRST_TOKEN))
        steps(cache, departures.hear, lambda: turn() and name not in departures)
        cache.abort(name)
        steps(cache, departures.hear, lambda: not cache.inspection.in_flight)
        cache.inspection.check()
        return dict(departures.outcomes)

    return program


def take_up(
    name: str, tokens: KeyedTokens, post: Post, *, patience_s: float = 10.0
) -> Callable[[Cache, ForwardPass], Reception]:
    """Return the program of a rank that waits for a request, and computes what does not come."""
    ids = tokens.ids

    def program(cache: Cache, forward: ForwardPass) -> Reception:
        arrivals = Arrivals(cache, terms_of(cache), post.sender(cache), patience_s=patience_s)
        arrivals.expect(name, ids, "prefill")
        arrived: list[Arrived] = []
        admission: list[Admission] = []

        def has_come() -> bool:
            arrived.extend(arrivals.step())
            return bool(arrived)

        def is_admitted() -> bool:
            answer = cache.load_back(name, ids, reserve_tokens=len(ids))
            admission.extend([answer] if isinstance(answer, Admission) else [])
            return bool(admission)

        steps(cache, arrivals.hear, has_come)
        steps(cache, arrivals.hear, is_admitted)
        steps(cache, arrivals.hear, lambda: cache.load_state(name) is LoadState.READY)
        cached = admission[0].cached_tokens
        # Chunks end where the cache wants to keep a state.
        ends = [each for each in admission[0].checkpoints if cached < each < len(ids)]
        for start, stop in pairwise(dict.fromkeys((cached, *ends, len(ids)))):
            forward.compute([TokenSpan(request=name, tokens=tokens, start=start, stop=stop)])
            forward.begin_page(name, tokens, stop)
        compared = forward.verify(name, tokens, len(ids), moved=True)
        manifest = arrived[0].manifest
        return Reception(
            cached_tokens=cached,
            wrong_pages=sum(each.corrupt for each in compared.values()),
            outcome=next(iter(arrivals.outcomes)),
            first_token=None if manifest is None else manifest.first_token,
            refusals=tuple(arrivals.refusals),
        )

    return program
