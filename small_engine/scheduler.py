"""A minimal continuous-batching engine: the same decisions on every rank, step by step.

A closed loop keeps at most `concurrency` requests in the system. A step does, in this order:

1. Arrivals: requests enter the waiting queue, and their prefetches begin.
2. Loads that have ended: their requests are ready, or go back to the head of the queue.
3. Admission of the queue's head, while the admitted prompts do not fill the step's prefill budget.
4. One token for every request that decodes, then prefill in chunks within the budget.
5. `cache.step`: the one round.

A request reserves all of its pages when it is admitted, or chunk by chunk if the model has sliding
windows (`chunks`). A chunk that finds no room waits, nobody is admitted in the meantime, and when
nothing can move any more the youngest admitted request gives up its pages and begins again later.

Decisions depend on the workload and on what the cache answers, which is the same on every rank;
never on a clock. The model is a `ForwardPass`, which writes what it computes into every pool;
everything that a request gets from the cache is verified when it is ready and, as far as it is still
its own, once more when it has finished.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InternalError
from ..ranks.replica.answers import Wait
from ..ranks.replica.requests import LoadState
from .active_request import ActiveRequest
from .chunks import Chunks
from .counts import ReplayCounts
from .forward_pass import Forward, ForwardPass, TokenSpan
from .request import Requested, WorkloadRequest

if TYPE_CHECKING:
    from ..ranks.cache import Cache

REFUSALS_NAMED = 10
"""How many refused requests are kept by name; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Bounds the scheduler. Equal on every rank."""

    concurrency: int
    page_tokens: int
    device_pages: int
    prefill_tokens: int
    output_tokens_max: int
    """0 stands for no limit."""
    verify: bool = True
    idle_s: float = 0.003
    """How long a step waits for local progress when there is nothing to compute."""
    idle_steps_max: int = 100_000
    """Steps in a row in which no request moves, after which the engine is taken for stuck."""


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
        forward: Forward | None = None,
    ) -> None:
        """`on_done` is told how many requests have left; `stopped` is asked once in every step.

        `forward` is the model, a `ForwardPass` by default.
        """
        self.counts = ReplayCounts()
        self.refusals: list[str] = []
        self._cache = cache
        self._forward: Forward = forward or ForwardPass(cache)
        self._chunks = Chunks.of(cache.config)
        self._requests = requests
        self._limits = limits
        self._on_done = on_done
        self._stopped = stopped
        self._exhausted = False
        self._waiting: deque[ActiveRequest] = deque()
        self._loading: list[ActiveRequest] = []
        self._prefilling: deque[ActiveRequest] = deque()
        self._decoding: list[ActiveRequest] = []
        self._turns = 0
        self._no_room = False
        self._idle_steps = 0

    def run(self) -> bool:
        """Serve every request. Returns False if `stopped` said so first.

        Raises `InternalError` if no request moves for `idle_steps_max` steps.
        """
        while not self._stopped():
            moved = self.turn()
            if self._exhausted and not self.in_system:
                return True
            self._cache.step(idle_s=0.0 if moved else self._limits.idle_s)
        return False

    def turn(self) -> bool:
        """Do all of one step but its round; say whether anything has moved. See `run`."""
        moved = self._arrivals()
        moved |= self._ended_loads()
        moved |= self._admissions()
        self._no_room = False
        moved |= self._decode()
        moved |= self._prefill()
        moved |= self._departures()
        moved = moved or self._preempt()
        # A group that serves others waits for requests as long as none comes.
        self._idle_steps = 0 if moved or not self.in_system else self._idle_steps + 1
        self.counts.idle_steps += not moved
        if self._idle_steps > self._limits.idle_steps_max:
            raise InternalError(self._what_is_stuck())
        return moved

    def abort(self, name: str) -> None:
        """Let go of a request wherever it stands; of one that is not here, too."""
        for queue in (self._waiting, self._prefilling):
            for active in [each for each in queue if each.name == name]:
                queue.remove(active)
        self._loading = [each for each in self._loading if each.name != name]
        self._decoding = [each for each in self._decoding if each.name != name]
        self._cache.abort(name)

    @property
    def _queues(self) -> dict[str, Sequence[ActiveRequest]]:
        """The requests in the system, by where they are."""
        return {
            "waiting": self._waiting,
            "loading": self._loading,
            "in prefill": self._prefilling,
            "decoding": self._decoding,
        }

    @property
    def in_system(self) -> int:
        """How many requests are here."""
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
                self._cache.prefetch(active.name, active.matchable)
                self._waiting.append(active)
        return moved

    def _active(self, request: Requested) -> ActiveRequest | None:
        """Return a request that has come, or None if it can never fit and is refused."""
        page_tokens = self._limits.page_tokens
        most = self._limits.output_tokens_max
        active = ActiveRequest(request, page_tokens=page_tokens, output_tokens_max=most)
        pages = -(-active.total // page_tokens)
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
        still_loading: list[ActiveRequest] = []
        failed: list[ActiveRequest] = []
        for active in self._loading:
            state = self._cache.load_state(active.name)
            if state is LoadState.READY:
                self._begin_prefill(active)
            elif state is LoadState.FAILED:
                self.counts.loads_failed += 1
                active.begin_again()
                failed.append(active)
            else:
                still_loading.append(active)
        moved = len(still_loading) < len(self._loading)
        self._loading = still_loading
        self._waiting.extendleft(reversed(failed))
        return moved

    def _begin_prefill(self, active: ActiveRequest) -> None:
        if active.admission is None:
            raise InternalError(f"{active.name} is ready and was not admitted")
        active.computed = active.hit_tokens
        self._verify(active, finished=False)
        self._prefilling.append(active)

    def _admissions(self) -> bool:
        """Admit requests, unless one that is admitted has found no room in the step before."""
        moved = False
        while self._waiting and not self._no_room and self._backlog < self._limits.prefill_tokens:
            head = self._waiting[0]
            if not self._cache.prefetch_done(head.name):
                break
            reserve = 0 if self._chunks.one_by_one else head.total
            answer = self._cache.load_back(head.name, head.wanted, reserve_tokens=reserve)
            if isinstance(answer, Wait):
                break
            moved = True
            self._waiting.popleft()
            self._turns += 1
            head.admission, head.turn = answer, self._turns
            head.reserved = self._chunks.whole_pages(max(reserve, answer.cached_tokens))
            if self._cache.load_state(head.name) is LoadState.READY:
                self._begin_prefill(head)
            else:
                self._loading.append(head)
        return moved

    @property
    def _backlog(self) -> int:
        """Prompt tokens of admitted requests that are not computed; loads count as if they hit."""
        loading = sum(active.prompt - active.hit_tokens for active in self._loading)
        return loading + sum(active.prompt - active.computed for active in self._prefilling)

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
        # What a request that decodes could not get must not go to one that came after it.
        while self._prefilling and budget and not self._no_room:
            active = self._prefilling[0]
            end = self._chunks.end(active.computed, active.prompt, budget, active.checkpoints)
            if not self._reserve(active, end):
                break
            budget -= end - active.computed
            self._compute([(active, end)])
            moved = True
            if active.computed < active.prompt:
                self._publish(active)
                continue
            self._prefilling.popleft()
            self._prompt_is_computed(active)
        return moved

    def _prompt_is_computed(self, active: ActiveRequest) -> None:
        """Let a request that has its prompt go on with its output."""
        if active.computed == active.last:
            self._finish(active)
        else:
            self._publish(active)
            self._decoding.append(active)

    def _departures(self) -> bool:
        """Let requests go to other groups; here none do."""
        return False

    def _reserve(self, active: ActiveRequest, tokens: int) -> bool:
        """Have device pages for the first `tokens` tokens; False if there is no room for them now."""
        if tokens <= active.reserved:
            return True
        if not self._cache.extend(active.name, tokens):
            self._no_room = True
            return False
        active.reserved = self._chunks.whole_pages(tokens)
        return True

    def _compute(self, parts: Sequence[tuple[ActiveRequest, int]]) -> None:
        """Compute each request up to the length that goes with it."""
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

    def _preempt(self) -> bool:
        """Take its pages from the youngest admitted request, if there is no other way to go on.

        The oldest is never the youngest of several, so that it finishes; then there is more room.
        """
        admitted = [*self._prefilling, *self._decoding]
        if (
            not self._no_room
            or self._loading
            or len(admitted) < 2
            or not self._cache.inspection.idle
        ):
            return False
        youngest = max(admitted, key=lambda active: active.turn)
        self._prefilling = deque(each for each in self._prefilling if each is not youngest)
        self._decoding = [each for each in self._decoding if each is not youngest]
        self.counts.preempted += 1
        self.counts.preempted_tokens += youngest.computed - youngest.hit_tokens
        youngest.begin_again()
        self._cache.release(youngest.name)
        # What it has published may leave the device before its turn comes again, and the host too.
        self._cache.prefetch(youngest.name, youngest.matchable)
        self._waiting.appendleft(youngest)
        return True

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
        """Count a request that was served here."""
        hits = active.admission
        if hits is None:
            raise InternalError(f"{active.name} was served and was not admitted")
        self.counts.requests += 1
        self.counts.prompt_tokens += active.prompt
        self.counts.computed_tokens += active.prompt - hits.cached_tokens
        self.counts.hit_device_tokens += hits.device_tokens
        self.counts.hit_host_tokens += hits.host_tokens
        self.counts.hit_storage_tokens += hits.storage_tokens
        self.counts.output_tokens += active.outputs
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
