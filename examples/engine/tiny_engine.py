"""A small engine around a cache: continuous batching, chunked prefill, greedy decoding.

Every rank runs this file with the same requests. What it decides follows from the requests and from
what the cache answers, and both are the same on every rank; so all ranks call the cache alike, in the
same order, and need no other word from each other. Nothing here looks at a clock or at this rank's
memory, and `Cache.step`, once in each step of the engine, is where the ranks agree.

A request is in `waiting` until it is admitted. From then on the cache knows how far its pages are
(`load_state`), and the engine keeps no second account of it.
"""

from collections import Counter, deque
from dataclasses import dataclass

from tiny_transformer import TinyTransformer

from lockstep import Admission, Cache, LoadState, Wait

IDLE_S = 0.001
"""How long a step without anything to compute waits for what is in flight."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A prompt, and what has come out for it so far."""

    name: str
    tokens: list[int]
    """The prompt, then the outputs. The last token's keys and values are never there yet."""
    last: int
    """How many tokens there are in the end."""
    computed: int = 0
    """Of how many tokens the keys and values are in the request's pages."""
    found: Admission | None = None
    """Where its prefix came from when it was admitted first."""


class Engine:
    """One rank's engine: it drives one cache and one rank's share of a model."""

    def __init__(self, cache: Cache, model: TinyTransformer, *, chunk_tokens: int = 64) -> None:
        """Prompts are computed in chunks of `chunk_tokens` tokens, one in each step."""
        self.waiting: deque[Request] = deque()
        self.admitted: list[Request] = []
        """Those that were admitted, the oldest first."""
        self.served: dict[str, Request] = {}
        self.events: Counter[str] = Counter()
        """How often the cache answered what; read by whoever is curious."""
        self._cache = cache
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._page_tokens = cache.config.layout.page_tokens
        self._keys = cache.device_pool.column("k")
        self._values = cache.device_pool.column("v")

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn, while storage is asked for its prefix."""
        pages = -(-request.last // self._page_tokens)
        if pages > self._cache.device_pool.pages:
            raise ValueError(f"{request.name} needs {pages} device pages, which there never are")
        self._ask_storage(request)
        self.waiting.append(request)

    def run(self) -> None:
        """Serve all requests."""
        while self.waiting or self.admitted:
            self.step()

    def step(self) -> None:
        """Compute what is ready, let others in, and end with the one round of this step."""
        has_computed = self._compute()
        self._bring_back()
        self._admit()
        self._cache.step(idle_s=0.0 if has_computed else IDLE_S)

    def abort(self, name: str) -> None:
        """Drop a request wherever it stands; every rank does so in the same step."""
        self.waiting = deque(each for each in self.waiting if each.name != name)
        self.admitted = [each for each in self.admitted if each.name != name]
        self._cache.abort(name)

    def _ask_storage(self, request: Request) -> None:
        # The last token has to be computed in any case: what comes out follows from it.
        self._cache.prefetch(request.name, request.tokens[:-1])

    def _admit(self) -> None:
        """Admit those that wait, in their order, as long as there is room."""
        if any(self._state(each) in {LoadState.SAVING, LoadState.SAVED} for each in self.admitted):
            return  # Those that had to leave were here before.
        while self.waiting and self._cache.prefetch_done(self.waiting[0].name):
            request = self.waiting[0]
            answer = self._cache.load_back(
                request.name, request.tokens[:-1], reserve_tokens=len(request.tokens)
            )
            if isinstance(answer, Wait):
                # NO_ROOM: others will end. LOADING: another one loads the same pages, which will be
                # on the device then. Nothing is held meanwhile; ask again in the next step.
                self.events[f"wait: {answer}"] += 1
                return
            self.waiting.popleft()
            self.admitted.append(request)
            request.computed = answer.cached_tokens
            request.found = request.found or answer

    def _compute(self) -> bool:
        """Compute a chunk of each request that is ready, the oldest first; say whether any was."""
        has_computed = False
        for request in list(self.admitted):
            match self._state(request):
                case LoadState.READY:
                    if not self._advance(request):
                        # Nobody younger gets what an older one finds no room for.
                        self._make_room()
                        break
                    has_computed = True
                case LoadState.FAILED:
                    self._begin_again(request, "failed")
                case LoadState.LOADING | LoadState.SAVING | LoadState.SAVED:
                    pass  # Its pages are on their way, or not on the device.
        return has_computed

    def _advance(self, request: Request) -> bool:
        """Compute the next chunk, which is one token once the prompt is there; False without room."""
        start = request.computed
        end = min(len(request.tokens), start + self._chunk_tokens)
        if not self._cache.extend(request.name, end):
            return False
        # Read anew each time: to insert, to load and to resume may give a request other pages.
        pages = self._cache.page_table(request.name)
        token = self._model.next_token(
            request.tokens[start:end], start, pages, self._keys, self._values
        )
        request.computed = end
        if end == len(request.tokens):
            request.tokens.append(token)
        is_done = len(request.tokens) == request.last
        if is_done or end // self._page_tokens > start // self._page_tokens:
            # What is published is shared from here on, and never written again.
            self._cache.insert(request.name, request.tokens[:end], final=is_done)
        if is_done:
            self._cache.release(request.name)
            self.admitted.remove(request)
            self.served[request.name] = request
        return True

    def _make_room(self) -> None:
        """Let the youngest leave the device, unless pages come free without that."""
        states = [self._state(each) for each in self.admitted]
        if LoadState.SAVING in states or LoadState.LOADING in states:
            return  # The one gives pages back in a moment, the other can leave in a moment.
        ready = [each for each in self.admitted if self._state(each) is LoadState.READY]
        youngest = ready[-1]
        if youngest is self.admitted[0]:
            return  # It is alone: what it needs is still being copied, and then free.
        if self._cache.retract(youngest.name, youngest.tokens[: youngest.computed]):
            self.events["retracted"] += 1
        else:
            # Host memory has no room for it either. What it has published may still be found.
            self._cache.release(youngest.name)
            self._begin_again(youngest, "begun again")

    def _bring_back(self) -> None:
        """Resume those that had to leave, the oldest first, as long as there is room."""
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
        """Let a request that has no pages any more be admitted anew, before those that wait.

        The tokens that have come out are known, and are computed with the prompt.
        """
        self.events[why] += 1
        self.admitted.remove(request)
        self._ask_storage(request)
        request.computed = 0
        self.waiting.appendleft(request)

    def _state(self, request: Request) -> LoadState:
        return self._cache.load_state(request.name)
