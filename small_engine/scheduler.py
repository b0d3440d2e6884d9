"""A minimal continuous-batching engine that makes equal decisions on every rank in each step.

At most `concurrency` requests are in the system. A step does, in this order:

1. Queue arriving requests and start their prefetches.
2. Make requests ready whose loads have finished; requeue requests whose loads or saves failed.
3. Resume retracted requests, oldest first; then admit the queue's head, within the prefill budget.
4. Compute one token of every decoding request, then prefill in chunks within the budget.
5. If a request found no room, retract the youngest admitted request (`retractions`).
6. Run the step's one round by `cache.step`.

A request reserves its prompt's pages at admission, or per chunk if the model has sliding windows
(`chunks`), and its output's pages as it decodes. If an older request finds no room, no younger request
gets any, and the youngest is retracted. So the oldest request always makes progress and no request
starves. A resumed request computes at least one token before it is retracted again. A request that
cannot be saved is recomputed, but only when no other request can make progress.

Decisions depend only on the workload and the cache's answers, never on a clock. The model is a
`ForwardPass`, which writes computed content into every pool. Cached content is verified when its
request becomes ready. It is verified again when the request finishes, if the request still holds the
pages.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import InternalError
from ..ranks.protocol.answers import Wait
from ..ranks.replica.operations.requests import LoadState
from .active_request import ActiveRequest, turn_of
from .chunks import Chunks
from .counts import ReplayCounts
from .forward_pass import ForwardPass, TokenSpan
from .limits import EngineLimits
from .request import WorkloadRequest
from .retractions import Retractions

if TYPE_CHECKING:
    from ..ranks.group.cache import Cache

REFUSALS_NAMED = 10
"""Maximum number of refused requests that are listed by name. All refused requests are counted."""


class Scheduler:
    """Drives one rank's cache through a workload."""

    def __init__(
        self,
        cache: "Cache",
        requests: Iterator[WorkloadRequest],
        limits: EngineLimits,
        *,
        on_done: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_done` gets the number of finished requests; `run` returns once `stopped()` is true."""
        self.counts = ReplayCounts()
        self.refusals: list[str] = []
        self._cache = cache
        self._forward = ForwardPass(cache)
        self.retractions = Retractions(cache, self._forward, self.counts)
        """The retracted requests. Public, because callers report on them."""
        self._chunks = Chunks.of(cache.config)
        self._requests = requests
        self._limits = limits
        self._on_done = on_done
        self._stopped = stopped
        self._exhausted = False
        self._waiting: deque[ActiveRequest] = deque()
        self._loading: list[ActiveRequest] = []
        self._prefilling: list[ActiveRequest] = []
        self._decoding: list[ActiveRequest] = []
        self._turns = 0
        self._short: list[ActiveRequest] = []
        """Requests for which the current step found no free pages."""
        self._idle_steps = 0

    def run(self) -> bool:
        """Serve every request. Return False if `stopped` returned true first.

        Raises `InternalError` if no request makes progress for `idle_steps_max` steps.
        """
        while not self._stopped():
            moved = self._turn()
            if self._exhausted and not self.in_system:
                return True
            self._cache.step(idle_s=0.0 if moved else self._limits.idle_s)
        return False

    def _turn(self) -> bool:
        """Run one step without its round; return whether any request made progress."""
        moved = self._arrivals()
        moved |= self._ended_loads()
        moved |= self._ended_saves()
        moved |= self._admissions()
        self._short = []
        moved |= self._decode()
        moved |= self._prefill()
        moved |= self._make_room(moved)
        self._idle_steps = 0 if moved else self._idle_steps + 1
        self.counts.idle_steps += not moved
        if self._idle_steps > self._limits.idle_steps_max:
            raise InternalError(self._what_is_stuck())
        return moved

    def abort(self, name: str) -> None:
        """Abort a request in any state. Every rank must call this in the same step."""
        for queue in (self._waiting, self._loading, self._prefilling, self._decoding):
            for active in [each for each in queue if each.name == name]:
                queue.remove(active)
        self.retractions.forget(name)
        self._cache.abort(name)

    @property
    def _queues(self) -> dict[str, Sequence[ActiveRequest]]:
        """The requests that have arrived and not finished, grouped by state."""
        return {
            "waiting": self._waiting,
            "loading": self._loading,
            "in prefill": self._prefilling,
            "decoding": self._decoding,
            "aside": self.retractions.requests,
        }

    @property
    def in_system(self) -> int:
        return sum(map(len, self._queues.values()))

    def _arrivals(self) -> bool:
        moved = False
        while not self._exhausted and self.in_system < self._limits.concurrency:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
                break
            moved = True
            active = self._active(request)
            if active is not None:
                self._cache.prefetch(active.name, active.matchable, active.namespace)
                self._waiting.append(active)
        return moved

    def _active(self, request: WorkloadRequest) -> ActiveRequest | None:
        """Return the next arriving request; refuse it and return None if it can never fit."""
        active = ActiveRequest(request, self._limits)
        pages = -(-active.total // self._limits.page_tokens)
        if pages > self._limits.device_pages:
            self._refuse(active, pages)
            return None
        return active

    def _refuse(self, active: ActiveRequest, pages: int) -> None:
        self.counts.refused += 1
        if len(self.refusals) < REFUSALS_NAMED:
            self.refusals.append(
                f"{active.name} needs {pages} device pages for {active.total} tokens, and there "
                f"are {self._limits.device_pages}; raise --device-pages"
            )
        self._report_done()

    def _ended_loads(self) -> bool:
        ended = [
            e for e in self._loading if self._cache.load_state(e.name) is not LoadState.LOADING
        ]
        for active in ended:
            self._loading.remove(active)
            if self._cache.load_state(active.name) is LoadState.READY:
                self._ready(active)
            else:
                self.counts.loads_failed += 1
                self._begin_again(active)
        return bool(ended)

    def _ended_saves(self) -> bool:
        lost = self.retractions.step()
        for active in lost or ():
            self.counts.saves_failed += 1
            self._begin_again(active)
        return lost is not None

    def _begin_again(self, active: ActiveRequest) -> None:
        """Requeue a request whose cached pages were lost; the queue is ordered by first admission."""
        self.retractions.forget(active.name)
        active.begin_again()
        self._cache.abort(active.name)
        # Prefetch again, because published pages may be evicted from device and host before the next
        # admission.
        self._cache.prefetch(active.name, active.matchable, active.namespace)
        insort(self._waiting, active, key=turn_of)

    def _ready(self, active: ActiveRequest) -> None:
        """Start computing a request whose cached pages have been loaded."""
        if active.admission is None:
            raise InternalError(f"{active.name} is ready and was not admitted")
        active.hits = active.hits or active.admission
        active.computed = active.hit_tokens
        self.counts.recomputed_tokens += max(0, active.lost - active.computed)
        active.lost = 0
        self.retractions.came_back(active.name)
        # Verify the partial last page, too. Only a resumed request has one, because all other cached
        # prefixes end with a whole page.
        self._verify(active, finished=False, moved=True)
        if active.computed < active.goal:
            insort(self._prefilling, active, key=turn_of)
        else:
            self._prompt_is_computed(active)

    def _admissions(self) -> bool:
        """Resume and admit requests, unless an admitted request found no room in the last step."""
        if self._short:
            return False
        moved = False
        for active, is_admitted in self.retractions.bring_back(self._room_for):
            moved = True
            if is_admitted:
                self._admitted(active)
            else:
                self._begin_again(active)
        # Admit waiting requests only if no request is retracted, because retracted requests arrived
        # earlier.
        while self._waiting and not self.retractions.requests:
            head = self._waiting[0]
            if self._backlog >= self._limits.prefill_tokens:
                break
            if not self._cache.prefetch_done(head.name):
                break
            reserve = self._room_for(head)
            answer = self._cache.load_back(
                head.name, head.matchable, head.namespace, reserve_tokens=reserve
            )
            if isinstance(answer, Wait):
                break
            moved = True
            self._waiting.popleft()
            self._turns += 1
            head.turn = min(head.turn, self._turns)
            head.admit(answer, reserve)
            self._admitted(head)
        return moved

    def _room_for(self, active: ActiveRequest) -> int:
        """Return the number of tokens for which an admitted or resumed request reserves device pages.

        The number includes at least one token to compute, so that the request can make progress.
        """
        return min((active.computed if self._chunks.one_by_one else active.goal) + 1, active.last)

    def _admitted(self, active: ActiveRequest) -> None:
        if self._cache.load_state(active.name) is LoadState.READY:
            self._ready(active)
        else:
            self._loading.append(active)

    @property
    def _backlog(self) -> int:
        """Number of prompt tokens that admitted requests still have to compute if all loads succeed."""
        loading = sum(max(0, active.goal - active.hit_tokens) for active in self._loading)
        return loading + sum(active.goal - active.computed for active in self._prefilling)

    def _decode(self) -> bool:
        ready = [each for each in self._decoding if self._reserve(each, each.computed + 1)]
        self._compute([(active, active.computed + 1) for active in ready])
        for active in ready:
            if active.computed == active.last:
                self._finish(active)
            elif self._chunks.publishes(active.computed):
                self._publish(active)
        self._decoding = [each for each in self._decoding if each.computed < each.last]
        return bool(ready)

    def _prefill(self) -> bool:
        budget = self._limits.prefill_tokens
        moved = False
        for active in list(self._prefilling):
            while budget and active.computed < active.goal:
                end = self._chunks.end(active.computed, active.goal, budget, active.checkpoints)
                if not self._reserve(active, end):
                    # If no more pages can be reserved, compute only up to the end of the pages reserved
                    # before.
                    end = min(end, active.reserved)
                if end <= active.computed:
                    break
                budget -= end - active.computed
                self._compute([(active, end)])
                moved = True
                if active.computed < active.goal:
                    self._publish(active)
        computed = [each for each in self._prefilling if each.computed >= each.goal]
        self._prefilling = [each for each in self._prefilling if each.computed < each.goal]
        for active in computed:
            self._prompt_is_computed(active)
        return moved

    def _prompt_is_computed(self, active: ActiveRequest) -> None:
        """Start decoding a request whose prompt is computed."""
        if active.computed == active.last:
            self._finish(active)
        else:
            self._publish(active)
            insort(self._decoding, active, key=turn_of)

    def _reserve(self, active: ActiveRequest, tokens: int) -> bool:
        """Reserve device pages for the first `tokens` tokens; return False if there is no room now."""
        if tokens <= active.reserved:
            return True
        # An older request found no room in this step, so younger requests must not get any.
        if self._short or not self._cache.extend(active.name, tokens):
            self._short.append(active)
            return False
        active.reserved = self._chunks.whole_pages(tokens)
        return True

    def _compute(self, parts: Sequence[tuple[ActiveRequest, int]]) -> None:
        """Compute the tokens of requests; `parts` has pairs (request, length to compute up to)."""
        self._forward.compute(
            [
                TokenSpan(request=each.name, tokens=each.tokens, start=each.computed, stop=end)
                for each, end in parts
            ]
        )
        for active, end in parts:
            active.computed = end

    def _publish(self, active: ActiveRequest) -> None:
        self._cache.insert(active.name, active.computed_ids, final=False)

    def _make_room(self, moved: bool) -> bool:
        """Free the youngest request's pages if an older request has no room; return whether it did.

        The youngest request is retracted. If that fails, it is requeued to be computed again, but only
        if no request progressed (`moved`) and the cache is idle.
        """
        running = [*self._prefilling, *self._decoding]
        youngest = self.retractions.next_to_retract(self._short, running)
        if youngest is None:
            return False
        if youngest.computed and self.retractions.retract(youngest):
            self._take_off(youngest)
            return True
        if moved or not self._cache.inspection.idle:
            return False
        self.counts.preempted += 1
        self._take_off(youngest)
        self._begin_again(youngest)
        return True

    def _take_off(self, active: ActiveRequest) -> None:
        queue = self._prefilling if active in self._prefilling else self._decoding
        queue.remove(active)

    def _verify(self, active: ActiveRequest, *, finished: bool, moved: bool = False) -> None:
        if self._limits.verify:
            verified = self._forward.verify(
                active.name, active.tokens, active.computed, moved=moved
            )
            self.counts.add(verified, finished=finished)

    def _finish(self, active: ActiveRequest) -> None:
        self._verify(active, finished=True)
        self._cache.insert(active.name, active.computed_ids, final=True)
        self._cache.release(active.name)
        self._count(active)

    def _count(self, active: ActiveRequest) -> None:
        """Count a request that has been served."""
        hits = active.hits
        if hits is None:
            raise InternalError(f"{active.name} was served and was never ready")
        self.counts.add_served(active.prompt, active.outputs, hits)
        self._report_done()

    def _report_done(self) -> None:
        self._on_done(self.counts.requests + self.counts.refused)

    def _what_is_stuck(self) -> str:
        where = "; ".join(
            f"{len(queue)} {name}, first {queue[0].name}"
            for name, queue in self._queues.items()
            if queue
        )
        return f"no request has moved for {self._limits.idle_steps_max} steps: {where}"
