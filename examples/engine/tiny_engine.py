"""A small engine around a cache: continuous batching, chunked prefill, greedy decoding.

Every rank runs this file with the same requests. Decisions depend only on the requests and on the
cache's answers, which are equal on every rank, so ranks need no other communication. The ranks agree in
`Cache.step`, called once per engine step.

A request is in `waiting` until it is admitted. Afterwards only the cache tracks the state of its pages
(`load_state`).
"""

from collections import Counter, deque
from dataclasses import dataclass

from tiny_transformer import TinyTransformer

from lockstep import Admission, Cache, LoadState, Wait

IDLE_S = 0.001
"""Seconds that a step waits for copies or reads in flight if no request can compute."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A request: its prompt, and the output so far."""

    name: str
    tokens: list[int]
    """The prompt's tokens, then the output tokens. The KV of the last token is not computed yet."""
    last: int
    """Number of tokens, prompt and output together, at which the request is finished."""
    computed: int = 0
    """Number of tokens whose KV is in the request's pages."""
    found: Admission | None = None
    """The first admission, which says from which tiers the cached prefix came; None before."""


class Engine:
    """One rank's engine, with one cache and one rank's shard of a model."""

    def __init__(self, cache: Cache, model: TinyTransformer, *, chunk_tokens: int = 64) -> None:
        """`chunk_tokens` is the maximum number of tokens that a request computes in one step."""
        self.waiting: deque[Request] = deque()
        self.admitted: list[Request] = []
        """Admitted requests, oldest first."""
        self.served: dict[str, Request] = {}
        self.events: Counter[str] = Counter()
        """How often requests were retracted, recomputed and so on, for display."""
        self._cache = cache
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._page_tokens = cache.config.layout.page_tokens
        self._keys = cache.device_pool.column("k")
        self._values = cache.device_pool.column("v")

    def submit(self, request: Request) -> None:
        """Queue a request and start the prefetch of its prefix."""
        pages = -(-request.last // self._page_tokens)
        if pages > self._cache.device_pool.pages:
            raise ValueError(f"{request.name} needs {pages} device pages, more than there are")
        self._ask_storage(request)
        self.waiting.append(request)

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.waiting or self.admitted:
            self.step()

    def step(self) -> None:
        """Compute ready requests, admit others, and run the step's one round."""
        has_computed = self._compute()
        self._bring_back()
        self._admit()
        self._cache.step(idle_s=0.0 if has_computed else IDLE_S)

    def abort(self, name: str) -> None:
        """Abort a request in any state. Every rank must abort the request in the same step."""
        self.waiting = deque(each for each in self.waiting if each.name != name)
        self.admitted = [each for each in self.admitted if each.name != name]
        self._cache.abort(name)

    def _ask_storage(self, request: Request) -> None:
        # Exclude the last token from the match, because the model must compute it to give the first
        # output.
        self._cache.prefetch(request.name, request.tokens[:-1])

    def _admit(self) -> None:
        """Admit waiting requests in order, as long as there is room."""
        if any(self._state(each) in {LoadState.SAVING, LoadState.SAVED} for each in self.admitted):
            return  # Resume the retracted requests first.
        while self.waiting and self._cache.prefetch_done(self.waiting[0].name):
            request = self.waiting[0]
            answer = self._cache.load_back(
                request.name, request.tokens[:-1], reserve_tokens=len(request.tokens)
            )
            if isinstance(answer, Wait):
                # NO_ROOM: wait until other requests finish. LOADING: another request is loading the
                # same pages. The request holds no pages in either case, so try to admit it again in the
                # next step.
                self.events[f"wait: {answer}"] += 1
                return
            self.waiting.popleft()
            self.admitted.append(request)
            request.computed = answer.cached_tokens
            request.found = request.found or answer

    def _compute(self) -> bool:
        """Compute a chunk of each ready request, oldest first; return whether any was computed."""
        has_computed = False
        for request in list(self.admitted):
            match self._state(request):
                case LoadState.READY:
                    if not self._advance(request):
                        # Do not compute younger requests, because they must not take room that an older
                        # one lacks.
                        self._make_room()
                        break
                    has_computed = True
                case LoadState.FAILED:
                    self._begin_again(request, "failed")
                case LoadState.LOADING | LoadState.SAVING | LoadState.SAVED:
                    pass  # Skip the request, because its pages are in host memory or being copied.
        return has_computed

    def _advance(self, request: Request) -> bool:
        """Compute a request's next chunk or token; return False if the device has no room for it."""
        start = request.computed
        end = min(len(request.tokens), start + self._chunk_tokens)
        if not self._cache.extend(request.name, end):
            return False
        # Get the page table for each chunk, because insert, load back and resume may change it.
        pages = self._cache.page_table(request.name)
        token = self._model.next_token(
            request.tokens[start:end], start, pages, self._keys, self._values
        )
        request.computed = end
        if end == len(request.tokens):
            request.tokens.append(token)
        is_done = len(request.tokens) == request.last
        if is_done or end // self._page_tokens > start // self._page_tokens:
            # Publish pages as soon as they are full. Published pages are shared, so the engine must not
            # write to them again.
            self._cache.insert(request.name, request.tokens[:end], final=is_done)
        if is_done:
            self._cache.release(request.name)
            self.admitted.remove(request)
            self.served[request.name] = request
        return True

    def _make_room(self) -> None:
        """Retract the youngest request, unless copies in flight will soon make room."""
        states = [self._state(each) for each in self.admitted]
        if LoadState.SAVING in states or LoadState.LOADING in states:
            # Wait, because a request being saved frees its pages soon, and one being loaded can be
            # retracted once it is ready.
            return
        ready = [each for each in self.admitted if self._state(each) is LoadState.READY]
        youngest = ready[-1]
        if youngest is self.admitted[0]:
            # Wait, because only the oldest request is ready, and it must not be retracted. It continues
            # once copies in flight have freed pages.
            return
        if self._cache.retract(youngest.name, youngest.tokens[: youngest.computed]):
            self.events["retracted"] += 1
        else:
            # Host memory has no room either, so recompute the request. A match may still find the pages
            # that it has published.
            self._cache.release(youngest.name)
            self._begin_again(youngest, "begun again")

    def _bring_back(self) -> None:
        """Resume retracted requests, oldest first, as long as there is room."""
        for request in list(self.admitted):
            if self._state(request) is not LoadState.SAVED:
                continue
            answer = self._cache.resume(request.name, reserve_tokens=request.computed + 1)
            match answer:
                case Admission():
                    self.events["resumed"] += 1
                case Wait.LOST:
                    self._begin_again(request, "lost")
                case Wait.NO_ROOM | Wait.LOADING:
                    self.events[f"wait: {answer}"] += 1
                    return

    def _begin_again(self, request: Request, why: str) -> None:
        """Requeue a request that lost its pages, ahead of all other waiting requests.

        The request keeps its output tokens and computes their KV like that of a prompt.
        """
        self.events[why] += 1
        self.admitted.remove(request)
        self._ask_storage(request)
        request.computed = 0
        self.waiting.appendleft(request)

    def _state(self, request: Request) -> LoadState:
        return self._cache.load_state(request.name)
