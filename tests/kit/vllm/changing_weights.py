"""A scripted engine without vLLM that changes its weights while it serves requests.

The plug-in's scheduler side, caches, replicas and rounds are real. Each page records the tokens of its
prefix, and the weights that computed each page of the prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from lockstep.integrations.vllm.groups import EVERY_TOKEN, GroupKind, PoolGroup
from lockstep.integrations.vllm.lent_blocks import LentBlocks
from lockstep.integrations.vllm.scheduler_side import SchedulerSide
from lockstep.integrations.vllm.tracked import PassResult
from lockstep.integrations.vllm.weights import InFlight, WeightsChange, WeightsTracker
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.orders import CopyToDevice, CopyToHost, Fence, Fetch, Order, Put
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, ScriptedExecutor
from tests.kit.vllm.sent_requests import Blocks, Scheduled, Sent
from tests.kit.vllm.sides import side_of

Answer = TypeVar("Answer")

FULL = [PoolGroup("kv", 0, GroupKind.FULL, PAGE_TOKENS, EVERY_TOKEN)]
CROWD = 24
"""Largest number of requests that have blocks at the same time."""


class Content(NamedTuple):
    """Content of a page: its prefix's tokens, and the weights that computed the prefix's pages."""

    weights: frozenset[str]
    tokens: tuple[int, ...]
    """All tokens of the prefix that ends with this page."""


class Remembering(ScriptedExecutor):
    """An executor that copies the `Content` of pages between tiers when `move` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.store: dict[bytes, Content] = {}

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        if self.given(Fence):
            self.move()

    def move(self) -> None:
        """Execute all orders and report success for them."""
        for order in self.orders:
            match order:
                case CopyToHost(transfers=transfers):
                    for each in transfers:
                        for source, to in zip(each.sources, each.destinations, strict=True):
                            self.host[to] = self.device[source]
                case CopyToDevice(transfers=transfers):
                    for each in transfers:
                        for source, to in zip(each.sources, each.destinations, strict=True):
                            self.device[to] = self.host[source]
                case Put(transfers=objects):
                    for one in objects:
                        self.store |= {
                            key: self.host[page]
                            for key, page in zip(one.keys, one.pages, strict=True)
                        }
                case Fetch(transfers=objects):
                    for one in objects:
                        self.host |= {
                            page: self.store[key]
                            for key, page in zip(one.keys, one.pages, strict=True)
                        }
                case _:
                    pass
        self.complete(self.store.__contains__)


class RememberingRanks(HostRanksInTurn):
    """A group whose executors record the `Content` of each page."""

    def _cache(self, rank: int, config: Any) -> HostCache:
        self.executors[rank] = Remembering()
        return super()._cache(rank, config)

    @property
    def memories(self) -> list[Remembering]:
        return [each for each in self.executors if isinstance(each, Remembering)]


@dataclass(eq=False)
class Served:
    """A request of the scripted engine."""

    sent: Sent
    arrived: int
    """Number of weight changes before the request arrived."""
    blocks: list[int] = field(default_factory=list[int])
    steps_left: int = 2
    """Number of scheduler steps until the request is finished. One step computes the prompt, and one
    step decodes a token."""
    in_flight: int = 0
    """Number of the request's tokens that were computed or were being loaded at the last weight change.
    """


@dataclass
class Counts:
    """Counters of the scripted engine."""

    seed: int = 0
    requests: int = 0
    hits: int = 0
    """Number of loaded tokens. A request is not counted if the weights changed between its arrival and
    its load."""
    stale: int = 0
    """Number of tokens in `hits` whose page was computed with wrong weights or from a wrong prefix."""
    in_flight: int = 0
    """Number of tokens that requests had computed or were loading at weight changes."""
    lost: int = 0
    """Number of the tokens in `in_flight` that were computed again."""


class ScriptedEngine:
    """Schedules requests as vLLM does, with the same decisions on all ranks."""

    def __init__(
        self,
        ranks: RememberingRanks,
        *,
        in_flight: InFlight = InFlight.KEEP,
        change: WeightsChange = WeightsChange.WITH_RESET,
    ) -> None:
        self.ranks = ranks
        self.lending = [LentBlocks(FULL) for _ in ranks.caches]
        self.sides = [
            side_of(
                cache,
                lending,
                weights=WeightsTracker({"default"}, cache.inspection.config.life.hex(), change),
                settings={"in_flight": in_flight},
            )
            for cache, lending in zip(ranks.caches, self.lending, strict=True)
        ]
        self.weights, self.changes = "default", 0
        self.counts = Counts()
        self._numbers = iter(range(1 << 60))
        self._blocks = iter(range(1 << 60))
        self._free: list[int] = []
        self._waiting: list[Served] = []
        self._loading: dict[str, Served] = {}
        self._running: list[Served] = []
        self._held: dict[str, list[int]] = {}
        self._steps = 0

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._loading or self._running or self._held)

    @property
    def queue(self) -> int:
        return len(self._waiting)

    @property
    def loading(self) -> int:
        return len(self._loading)

    def send(self, tokens: Sequence[int]) -> None:
        sent = Sent(list(tokens), request_id=str(next(self._numbers)))
        self._waiting.append(Served(sent, self.changes))
        self._every(lambda side: side.arrived(sent))
        self.counts.requests += 1

    def load_weights(self, weights: str) -> None:
        """Change the weights of later steps. Only `name` reports the change to the plug-in."""
        self.weights = weights
        self.changes += 1
        for each in (*self._loading.values(), *self._running):
            each.in_flight = each.sent.num_computed_tokens
            self.counts.in_flight += each.in_flight

    def name(self, version: str) -> None:
        """Report the current weights' version to the plug-in."""
        self._every(lambda side: side.weights_are(version))

    def reset(self, *, preempting: bool = False) -> None:
        """Reset the prefix cache and the connector; if `preempting`, first preempt running requests."""
        if preempting:
            for each in self._running:
                self._free += each.blocks
                self._lose(each)
            self._waiting = self._running + self._waiting
            self._running = []
        self._every(SchedulerSide.reset)

    def step(self) -> None:
        """Run a scheduler pass, a forward pass, and the I/O of some ranks."""
        self._schedule()
        scheduled = {
            each.sent.request_id: each.sent.num_tokens - each.sent.num_computed_tokens
            for each in self._running
        }
        tables = {each.sent.request_id: (each.blocks,) for each in self._running}
        # If there is no request, schedule a placeholder. A pass without requests would wait for the
        # other ranks. This would block forever, because all ranks run in this thread.
        step = Scheduled(scheduled or {"another": 1}, None, Blocks(lambda name: tables[name]))
        result = self._every(lambda side: side.end_pass(step))
        for each in self._running:
            self._compute(each)
        self._steps += 1
        for rank, memory in enumerate(self.ranks.memories):
            # Rank n runs its I/O in every (n + 1)th step, so that ranks differ in speed.
            if not self._steps % (rank + 1):
                memory.move()
        self._hear(result)
        self._finish()

    def _schedule(self) -> None:
        self._waiting = [each for each in self._waiting if not self._admit(each)]

    def _admit(self, each: Served) -> bool:
        full = len(self._running) + len(self._loading) == CROWD
        hit = None if full else self._every(lambda side: side.hit(each.sent, 0))
        if hit is None:
            return False
        each.blocks = list(self._take(-(-(each.sent.num_tokens + 3) // PAGE_TOKENS)))
        each.sent.num_computed_tokens = hit
        if hit:
            self._every(lambda side: side.allocated(each.sent, (each.blocks,), hit))
            self._loading[each.sent.request_id] = each
        else:
            self._running.append(each)
        return True

    def _hear(self, result: PassResult) -> None:
        for name in result.loaded:
            each = self._loading.pop(name)
            if name in result.failed:
                self._free += each.blocks
                self._lose(each)
                self._waiting.insert(0, each)
                continue
            self._check(each)
            self._running.append(each)
        for name in result.freed:
            self._free += self._held.pop(name)

    def _check(self, each: Served) -> None:
        """Count a request's loaded tokens, and how many of these tokens have wrong content."""
        if each.arrived != self.changes:
            return
        loaded = each.sent.num_computed_tokens
        self.counts.hits += loaded
        for memory in self.ranks.memories:
            for at in range(loaded // PAGE_TOKENS):
                tokens = tuple(each.sent.all_token_ids[: (at + 1) * PAGE_TOKENS])
                right = Content(frozenset({self.weights}), tokens)
                self.counts.stale += (memory.device[each.blocks[at]] != right) * PAGE_TOKENS

    def _lose(self, each: Served) -> None:
        self.counts.lost += each.in_flight
        each.in_flight = 0
        each.sent.num_computed_tokens = 0
        each.arrived = self.changes

    def _compute(self, each: Served) -> None:
        """Record the content of the pages that this pass completes, and append an output token."""
        sent = each.sent
        first, last = sent.num_computed_tokens // PAGE_TOKENS, sent.num_tokens // PAGE_TOKENS
        for memory in self.ranks.memories:
            before = memory.device[each.blocks[first - 1]].weights if first else frozenset[str]()
            for at in range(first, last):
                tokens = tuple(sent.all_token_ids[: (at + 1) * PAGE_TOKENS])
                memory.device[each.blocks[at]] = Content(before | {self.weights}, tokens)
        sent.num_computed_tokens = sent.num_tokens
        sent.all_token_ids.append(7)
        each.steps_left -= 1

    def _finish(self) -> None:
        over = [each for each in self._running if not each.steps_left]
        self._running = [each for each in self._running if each.steps_left]
        for each in over:
            self._end(each)

    def _end(self, each: Served) -> None:
        if self._every(lambda side: side.finished(each.sent, each.blocks)):
            self._held[each.sent.request_id] = each.blocks
        else:
            self._free += each.blocks

    def _take(self, count: int) -> Iterator[int]:
        for _ in range(count):
            yield self._free.pop() if self._free else next(self._blocks)

    def _every(self, command: Callable[[SchedulerSide], Answer]) -> Answer:
        answers = [command(side) for side in self.sides]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]
