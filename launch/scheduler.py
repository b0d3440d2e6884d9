"""A minimal continuous-batching engine: the same decisions on every rank, step by step.

A closed loop keeps at most `concurrency` requests in the system. A step does, in this order:

1. Arrivals: requests enter the waiting queue, and their prefetches begin.
2. Loads that have ended: their requests are ready, or go back to the head of the queue.
3. Admission of the queue's head, while the admitted prompts do not fill the step's prefill budget.
4. One token for every request that decodes, then prefill in chunks within the budget.
5. `cache.step`: the one round.

Decisions depend on the workload and on what the cache answers, which is the same on every rank;
never on a clock. The model's forward pass is `PageContents.fill`, and every page that a request gets
from the cache is verified when it is ready and once more, with its own pages, when it has finished.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InternalError
from ..ranks.replica.serving import Admission, LoadState, Wait
from .contents import PageContents, chain_keys
from .counts import Counts
from .request import Request, TokenIds, output_tokens

if TYPE_CHECKING:
    from ..ranks.cache import Cache

CONTENTS_SEED = sha256(b"lockstep replay contents").digest()
"""The start of the key chain that page contents are made from."""
REFUSALS_NAMED = 10
"""How many refused requests are kept by name; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the scheduler. Equal on every rank."""

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


class _Active:
    """A request in the system."""

    def __init__(self, request: Request, limits: Limits) -> None:
        most = limits.output_tokens_max
        self.request = request
        self.name = request.name
        self.prompt = request.prompt_length
        self.outputs = min(request.output_length, most) if most else request.output_length
        self.total = self.prompt + self.outputs
        # The last output token is never an input, so that its KV is not computed.
        self.last = self.prompt + max(0, self.outputs - 1)
        self.computed = 0
        self.admission: Admission | None = None
        outputs = output_tokens(request.index, self.outputs)
        self.tokens: TokenIds = np.concatenate([request.prompt_tokens, outputs])
        self.keys = chain_keys(CONTENTS_SEED, self.tokens.tobytes(), limits.page_tokens)

    @property
    def matchable(self) -> TokenIds:
        """What a match may cover: the last token of a prompt is always computed."""
        return self.tokens[: self.prompt - 1]


class Scheduler:
    """Drives one rank's cache through a workload."""

    def __init__(
        self,
        cache: "Cache",
        contents: PageContents,
        requests: Iterator[Request],
        limits: Limits,
        *,
        on_done: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_done` is told how many requests have left; `stopped` is asked once in every step."""
        self.counts = Counts()
        self.refusals: list[str] = []
        self._cache = cache
        self._contents = contents
        self._requests = requests
        self._limits = limits
        self._on_done = on_done
        self._stopped = stopped
        self._exhausted = False
        self._waiting: deque[_Active] = deque()
        self._loading: list[_Active] = []
        self._prefilling: deque[_Active] = deque()
        self._decoding: list[_Active] = []
        self._idle_steps = 0

    def run(self) -> bool:
        """Serve every request. Returns False if `stopped` said so first.

        Raises `InternalError` if no request moves for `idle_steps_max` steps.
        """
        while not self._stopped():
            moved = self._arrivals()
            moved |= self._ended_loads()
            moved |= self._admissions()
            moved |= self._decode()
            moved |= self._prefill()
            if self._exhausted and not self._in_system:
                return True
            self._idle_steps = 0 if moved else self._idle_steps + 1
            self.counts.idle_steps += not moved
            if self._idle_steps > self._limits.idle_steps_max:
                raise InternalError(self._what_is_stuck())
            self._cache.step(idle_s=0.0 if moved else self._limits.idle_s)
        return False

    @property
    def _in_system(self) -> int:
        return sum(map(len, (self._waiting, self._loading, self._prefilling, self._decoding)))

    def _arrivals(self) -> bool:
        moved = False
        while not self._exhausted and self._in_system < self._limits.concurrency:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
                break
            moved = True
            active = _Active(request, self._limits)
            pages = self._pages(active.total)
            if pages > self._limits.device_pages:
                self._refuse(active, pages)
                continue
            self._cache.prefetch(active.name, active.matchable)
            self._waiting.append(active)
        return moved

    def _refuse(self, active: _Active, pages: int) -> None:
        self.counts.refused += 1
        if len(self.refusals) < REFUSALS_NAMED:
            self.refusals.append(
                f"{active.name} needs {pages} device pages for {active.total} tokens, and there "
                f"are {self._limits.device_pages}; raise --device-pages"
            )
        self._report_done()

    def _ended_loads(self) -> bool:
        still_loading: list[_Active] = []
        failed: list[_Active] = []
        for active in self._loading:
            state = self._cache.load_state(active.name)
            if state is LoadState.READY:
                self._begin_prefill(active)
            elif state is LoadState.FAILED:
                self.counts.loads_failed += 1
                failed.append(active)
            else:
                still_loading.append(active)
        moved = len(still_loading) < len(self._loading)
        self._loading = still_loading
        self._waiting.extendleft(reversed(failed))
        return moved

    def _begin_prefill(self, active: _Active) -> None:
        if active.admission is None:
            raise InternalError(f"{active.name} is ready and was not admitted")
        hits = active.admission
        active.computed = hits.cached_tokens
        self.counts.hit_device_tokens += hits.device_tokens
        self.counts.hit_host_tokens += hits.host_tokens
        self.counts.hit_storage_tokens += hits.storage_tokens
        self.counts.pages_verified += self._verify(active)
        self._prefilling.append(active)

    def _admissions(self) -> bool:
        moved = False
        while self._waiting and self._backlog < self._limits.prefill_tokens:
            head = self._waiting[0]
            if not self._cache.prefetch_done(head.name):
                break
            answer = self._cache.load_back(head.name, head.matchable, reserve_tokens=head.total)
            if isinstance(answer, Wait):
                break
            moved = True
            self._waiting.popleft()
            head.admission = answer
            if self._cache.load_state(head.name) is LoadState.READY:
                self._begin_prefill(head)
            else:
                self._loading.append(head)
        return moved

    @property
    def _backlog(self) -> int:
        """Prompt tokens of admitted requests that are not computed; loads count as if they hit."""
        loading = sum(active.prompt - _hit_tokens(active) for active in self._loading)
        return loading + sum(active.prompt - active.computed for active in self._prefilling)

    def _decode(self) -> bool:
        moved = False
        still_decoding: list[_Active] = []
        for active in self._decoding:
            self._compute(active, 1)
            moved = True
            if active.computed == active.last:
                self._finish(active)
            else:
                still_decoding.append(active)
        self._decoding = still_decoding
        return moved

    def _prefill(self) -> bool:
        budget = self._limits.prefill_tokens
        moved = False
        while self._prefilling and budget:
            active = self._prefilling[0]
            tokens = min(budget, active.prompt - active.computed)
            budget -= tokens
            self.counts.computed_tokens += tokens
            self._compute(active, tokens)
            moved = True
            if active.computed < active.prompt:
                self._cache.insert(active.name, active.tokens[: active.computed], final=False)
                continue
            self._prefilling.popleft()
            if active.computed == active.last:
                self._finish(active)
            else:
                self._cache.insert(active.name, active.tokens[: active.computed], final=False)
                self._decoding.append(active)
        return moved

    def _compute(self, active: _Active, tokens: int) -> None:
        """Compute the next tokens: the pages that they complete get their contents."""
        before = active.computed // self._limits.page_tokens
        active.computed += tokens
        after = active.computed // self._limits.page_tokens
        if after > before:
            table = self._cache.page_table(active.name)
            pool = self._cache.device_pool
            self._contents.fill(pool, table[before:after], active.keys[before:after])

    def _verify(self, active: _Active) -> int:
        """Compare the whole pages of what the request has so far; return how many they are."""
        pages = active.computed // self._limits.page_tokens
        if not self._limits.verify or not pages:
            return 0
        table = self._cache.page_table(active.name)[:pages]
        pool = self._cache.device_pool
        self.counts.pages_corrupt += self._contents.verify(pool, table, active.keys[:pages])
        return pages

    def _finish(self, active: _Active) -> None:
        self.counts.pages_rechecked += self._verify(active)
        self._cache.insert(active.name, active.tokens[: active.computed], final=True)
        self._cache.release(active.name)
        self.counts.requests += 1
        self.counts.prompt_tokens += active.prompt
        self.counts.output_tokens += active.outputs
        self._report_done()

    def _report_done(self) -> None:
        self._on_done(self.counts.requests + self.counts.refused)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._limits.page_tokens)

    def _what_is_stuck(self) -> str:
        queues = {
            "waiting": self._waiting,
            "loading": self._loading,
            "in prefill": self._prefilling,
            "decoding": self._decoding,
        }
        where = "; ".join(
            f"{len(queue)} {name}, first {queue[0].name}" for name, queue in queues.items() if queue
        )
        return f"no request has moved for {self._limits.idle_steps_max} steps: {where}"


def _hit_tokens(active: _Active) -> int:
    hits = active.admission
    return 0 if hits is None else hits.cached_tokens
