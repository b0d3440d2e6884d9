"""The scheduler's half of the plug-in: it turns what vLLM's scheduler does into commands.

Every rank has a scheduler that decides the same in the same step, since everything that it hears
from here follows from verdicts: a hit that every rank has, a load that has ended on every rank, pages
that every rank has done with. So all ranks give the same commands.

One pass of the scheduler is one step of the cache. The first question of a pass applies a verdict,
and the pass ends with `end_pass`, which launches the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...ranks.host_cache import HostCache
from ...ranks.replica.serving import LoadState
from .contract import EngineRequest, ScheduledStep
from .tracked import TrackedRequest, may_be_cached, namespace_of


@dataclass(frozen=True, slots=True)
class PassResult:
    """What the scheduler is to hear after a step, the same on every rank."""

    loaded: frozenset[str]
    """Requests whose load is over, well or not."""
    failed: frozenset[str]
    """Those of them whose load failed."""
    freed: frozenset[str]
    """Finished requests whose pages are free."""


class SchedulerSide:
    """Gives the commands of one rank's cache. All calls come from the engine's thread."""

    def __init__(
        self,
        cache: HostCache,
        *,
        page_tokens: int,
        loads: bool,
        backs_up: bool,
        idle_wait_s: float,
    ) -> None:
        self.cache = cache
        self._page_tokens = page_tokens
        self._loads = loads
        self._backs_up = backs_up
        self._idle_wait_s = idle_wait_s
        self._arrivals = 0
        self._unfinished: set[str] = set()
        self._requests: dict[str, TrackedRequest] = {}
        """By the engine's id, which is another one on each rank."""
        self._loading: dict[str, TrackedRequest] = {}
        self._leaving: dict[str, str] = {}
        """By name: the engine's ids of finished requests whose blocks are still copied."""
        self._abandoned: set[str] = set()
        """Ids of requests that ended while they were loading: the engine waits for the load."""
        self._over: set[str] = set()
        """Those of them whose load is over, and of which the engine has not heard yet."""
        self._in_pass = False

    def arrived(self, request: EngineRequest) -> None:
        """Note a new request, and begin to bring what storage has of it."""
        self._unfinished.add(request.request_id)
        if not may_be_cached(request):
            return
        self._arrivals += 1
        namespace = namespace_of(request)
        tracked = TrackedRequest(request, self._arrivals, namespace, self._page_tokens)
        self._requests[request.request_id] = tracked
        self._prefetch(tracked)

    def hit(self, request: EngineRequest, device_tokens: int) -> int | None:
        """Return how many tokens can be loaded beyond `device_tokens`; None: ask again later."""
        self._begin_pass()
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._reads(request):
            return 0
        tracked.device_tokens = device_tokens
        length = tracked.loadable_tokens
        if length <= device_tokens:
            return 0
        if not self.cache.prefetch_done(tracked.name):
            return None
        return self.cache.hit(
            tracked.name, tracked.head(length), tracked.namespace, device_tokens=device_tokens
        )

    def allocated(self, request: EngineRequest, blocks: Sequence[int], load_tokens: int) -> None:
        """Begin the load that was promised, now that the request has `blocks` for it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not load_tokens:
            return
        first = tracked.device_tokens // self._page_tokens
        end_tokens = tracked.device_tokens + load_tokens
        self.cache.load(
            tracked.name,
            tracked.head(end_tokens),
            blocks[first : end_tokens // self._page_tokens],
            device_tokens=tracked.device_tokens,
        )
        self._loading[request.request_id] = tracked

    def end_pass(self, step: ScheduledStep) -> PassResult:
        """Give the commands that follow from what was scheduled, and launch the round."""
        self._begin_pass()
        preempted = [self._requests.get(name) for name in step.preempted_req_ids or ()]
        for each in sorted(filter(None, preempted), key=lambda each: each.number):
            self._preempted(each)
        if self._backs_up and step.kv_connector_block_state is not None:
            for name, tokens in step.num_scheduled_tokens.items():
                tracked = self._requests.get(name)
                if tracked is not None:
                    tracked.computed = True
                    self._back_up(tracked, tokens, step)
        self.cache.end_step(idle_s=0.0 if step.total_num_scheduled_tokens else self._idle_wait_s)
        self._in_pass = False
        return self._result()

    def finished(self, request: EngineRequest, blocks: Sequence[int]) -> bool:
        """Forget a request; say whether its blocks must stay as they are until they are freed."""
        self._unfinished.discard(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        loading = self._loading.pop(request.request_id, None) is not None
        if not blocks and not loading:
            # It was preempted, and its blocks were given away with nobody asking.
            self.cache.fence(tracked.name)
        free = self.cache.release(tracked.name)
        if not free:
            self._leaving[tracked.name] = request.request_id
        if loading:
            # The engine keeps the blocks of a request that loads until it is told that the load is
            # over, which says no more than that its blocks are free.
            (self._over if free else self._abandoned).add(request.request_id)
        return not free and not loading

    def settle(self) -> PassResult | None:
        """Wait for copies of finished requests' blocks, if nothing else keeps the engine stepping.

        An engine that stops with blocks held back cannot drop its own prefix cache, which it must be
        able to whenever its weights change.
        """
        if self._unfinished or not self.cache.pending_frees:
            return None
        self.cache.settle_copies()
        return self._result()

    def reset(self) -> None:
        """Offer nothing of what is cached now any more, nor what running requests have computed."""
        for tracked in self._requests.values():
            tracked.stale = tracked.computed
        self.cache.reset()

    def close(self, *, failed: bool) -> None:
        """Write out what is on its way, together with the other ranks, and end.

        A process that has `failed` ends alone, since the others are not going to end with it.
        """
        if failed:
            self.cache.abandon()
        else:
            self.cache.close()

    def _begin_pass(self) -> None:
        if not self._in_pass:
            self._in_pass = True
            self.cache.begin_step()

    def _reads(self, request: EngineRequest) -> bool:
        return self._loads and not request.skip_reading_prefix_cache

    def _prefetch(self, tracked: TrackedRequest) -> None:
        if self._reads(tracked.request):
            tokens = tracked.head(tracked.loadable_tokens)
            self.cache.prefetch(tracked.name, tokens, tracked.namespace)

    def _preempted(self, tracked: TrackedRequest) -> None:
        tracked.lent_pages = 0
        tracked.computed = tracked.stale = False
        self.cache.fence(tracked.name)
        self._prefetch(tracked)

    def _back_up(self, tracked: TrackedRequest, scheduled: int, step: ScheduledStep) -> None:
        request = tracked.request
        # Tokens that are only guessed, or not sampled yet, may still turn out to be others.
        known = min(request.num_computed_tokens + scheduled, request.num_tokens)
        pages = known // self._page_tokens
        if tracked.stale or pages <= tracked.lent_pages:
            return
        tracked.lent_pages = pages
        state = step.kv_connector_block_state
        assert state is not None
        blocks = state.resolve_block_ids(request.request_id)[0]
        tokens = tracked.head(pages * self._page_tokens)
        self.cache.back_up(tracked.name, tokens, blocks[:pages], tracked.namespace)

    def _result(self) -> PassResult:
        states = {
            each: self.cache.load_state(tracked.name) for each, tracked in self._loading.items()
        }
        loaded = {each for each, state in states.items() if state is not LoadState.LOADING}
        failed = {each for each in loaded if states[each] is LoadState.FAILED}
        for each in loaded:
            del self._loading[each]
        freed = {self._leaving.pop(name) for name in self.cache.take_freed()}
        ended = freed & self._abandoned
        self._abandoned -= ended
        over, self._over = loaded | ended | self._over, set()
        return PassResult(frozenset(over), frozenset(failed), frozenset(freed - ended))
