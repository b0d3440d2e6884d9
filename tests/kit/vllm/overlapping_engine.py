"""A small engine that schedules steps before earlier steps have ended.

The engine has one scheduler and one worker. The bytes of a block are derived from the tokens of its
prefix, and are copied to and from host memory. Each loaded block is compared with the expected bytes,
which reveals wrong blocks and late copies. A random generator with a seed selects the requests to
schedule, abort and preempt.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import torch

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.coordinator.lanes import BallotShape
from lockstep.integrations.vllm.groups import EVERY_TOKEN, GroupKind, PoolGroup
from lockstep.integrations.vllm.lent_blocks import HeldBlocks, LentBlocks
from lockstep.integrations.vllm.tracked import PassResult
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.group.one_scheduler.scheduler_cache import SchedulerCache, decide
from lockstep.ranks.group.one_scheduler.worker import WorkerRank
from lockstep.ranks.group.opening import open_rank
from lockstep.ranks.protocol.config import HostCacheConfig
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.network_config import Peers
from tests.kit.vllm.sent_requests import Blocks, CountedBlocks, Scheduled, Sent, Status
from tests.kit.vllm.sides import side_of

PAGE_TOKENS = 4
BLOCKS = 24
HOST_PAGES = 14
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="k", layers=1, heads=1, elements=1),)
)


@dataclass(eq=False)
class Running:
    request: Sent
    blocks: list[int]
    loaded: int = 0
    """Number of the request's tokens that are being loaded from the cache."""
    computing: bool = False


@dataclass(frozen=True)
class Step:
    """One step: the message from scheduler to worker, and the result of the scheduler pass."""

    sent: bytes
    result: PassResult
    computes: tuple[Running, ...]


@dataclass
class OverlappingEngine:
    """Serves requests until all have finished, with up to `depth` steps in flight."""

    seed: int
    depth: int
    peers: Peers | None = None
    """Peer settings, or None. With peer settings, every second request is handed over to another
    engine."""
    wrong: list[str] = field(default_factory=list[str])
    """Descriptions of the loaded pages that had wrong bytes."""
    restored: int = 0
    ended: int = 0
    host_pages: int = HOST_PAGES
    given: int = 0
    """Number of requests that were handed over to another engine."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.memory = torch.zeros(BLOCKS, 1, PAGE_TOKENS, 1, dtype=torch.bfloat16)
        self.pool = CountedBlocks()
        config = HostCacheConfig(
            model="m", layout=LAYOUT, host_pages=self.host_pages, peers=self.peers
        )
        pages = EnginePages(LAYOUT.shard(0, 1), {"k": [self.memory]})
        executor, replica = open_rank(config, InProcessGroup(1).member(0), pages)
        shape = BallotShape(world_size=1, prefetch_slots=config.bounds.prefetches)
        self.worker = WorkerRank(executor, shape, 0)
        self.cache: SchedulerCache = decide(
            [Opened(0, 1, config, replica, executor.serving_address())]
        )
        group = PoolGroup("kv", 0, GroupKind.FULL, PAGE_TOKENS, EVERY_TOKEN)
        lending = LentBlocks([group], HeldBlocks(self.pool))
        self.side = side_of(self.cache, lending, settings={"handing_over": {"ttl_s": 0.01}})
        self.waiting: deque[Sent] = deque()
        self.with_blocks: dict[str, Running] = {}
        self.held: dict[str, list[int]] = {}
        self.under_way: deque[Step] = deque()

    def serve(self, requests: int) -> None:
        """Serve `requests` random requests, and finish all steps in flight."""
        prefixes = [self.rng.choices(range(1, 9), k=7 * PAGE_TOKENS) for _ in range(3)]
        for number in range(requests):
            tokens = self.rng.choice(prefixes)[: self.rng.randint(1, 6) * PAGE_TOKENS + 1]
            params = {"do_remote_decode": True} if self.peers and number % 2 else None
            request = Sent(tokens, request_id=str(number), kv_transfer_params=params)
            self.side.arrived(request)
            self.waiting.append(request)
            self._turn()
        while self._has_work() or self.under_way:
            if self._has_work():
                self._turn()
            else:
                self._output(self.under_way.popleft())
        self.worker.close()

    @property
    def free(self) -> list[int]:
        return [block for block in range(BLOCKS) if not self.pool.users.get(block)]

    def _has_work(self) -> bool:
        helps = self.cache.can_progress or self.side.gives
        return bool(self.waiting or self.with_blocks or self.held) or helps

    def _turn(self) -> None:
        self.under_way.append(self._schedule())
        if len(self.under_way) >= self.depth:
            self._output(self.under_way.popleft())

    def _schedule(self) -> Step:
        """Run one scheduler pass: admit requests that find free blocks, and schedule some of them."""
        for _ in range(len(self.waiting)):
            request = self.waiting.popleft()
            if not self._begin(request):
                self.waiting.append(request)
        preempted = self._preempt()
        ready = [
            each for each in self.with_blocks.values() if not each.loaded and not each.computing
        ]
        computes = tuple(each for each in ready if self.rng.random() < 0.8)
        for each in computes:
            each.computing = True
        tokens = {
            each.request.request_id: each.request.num_tokens - each.request.num_computed_tokens
            for each in computes
        }
        tables = {name: each.blocks for name, each in self.with_blocks.items()}
        scheduled = Scheduled(tokens, preempted, Blocks(lambda name: (tables[name],)))
        result = self.side.end_pass(scheduled)
        return Step(self.cache.dispatch(), result, computes)

    def _begin(self, request: Sent) -> bool:
        needed = -(-request.num_tokens // PAGE_TOKENS)
        found = self.side.hit(request, 0)
        if found is None or len(self.free) < needed:
            return False
        blocks = self.rng.sample(self.free, needed)
        self.pool.hand_out(*blocks)
        self.pool.touch(blocks)
        request.num_computed_tokens = found
        self.with_blocks[request.request_id] = Running(request, blocks, loaded=found)
        if found:
            self.side.allocated(request, (blocks,), found)
        return True

    def _preempt(self) -> set[str]:
        """With a probability of 5 %, preempt a request that no step in flight computes.

        The request's blocks are freed at once.
        """
        idle = [
            each for each in self.with_blocks.values() if not each.loaded and not each.computing
        ]
        if not idle or self.rng.random() > 0.05:
            return set()
        chosen = self.rng.choice(idle)
        self._give_back(chosen)
        chosen.request.num_computed_tokens = 0
        self.waiting.append(chosen.request)
        return {chosen.request.request_id}

    def _give_back(self, running: Running) -> None:
        del self.with_blocks[running.request.request_id]
        self.pool.free_blocks(running.blocks)

    def _output(self, step: Step) -> None:
        """Execute a step on the worker, and deliver its output to the scheduler."""
        self.worker.apply_dispatch(step.sent)
        self.worker.begin_loads()
        for each in step.computes:
            self._compute(each)
        self.worker.begin_backups()
        ballots = self.worker.vote()
        # Process failed loads first, as vLLM does.
        for name in step.result.failed:
            self._failed(name)
        for each in step.computes:
            if each.request.request_id in self.with_blocks:
                self._end(each)
        self._abort()
        self.cache.deliver(ballots)
        answered = self.side.answered()
        for name in (*step.result.loaded, *answered.loaded):
            self._loaded(name)
        for name in (*step.result.freed, *answered.freed):
            self.pool.free_blocks(self.held.pop(name))

    def _compute(self, running: Running) -> None:
        tokens, first = running.request.all_token_ids, running.request.num_computed_tokens
        for at, block in enumerate(running.blocks):
            expected = contents(tokens, at)
            if (at + 1) * PAGE_TOKENS <= first:
                self.restored += PAGE_TOKENS
                if not torch.equal(self.memory[block].flatten(), expected):
                    self.wrong.append(f"request {running.request.request_id}, page {at}")
            self.memory[block] = expected.reshape(1, PAGE_TOKENS, 1)

    def _end(self, running: Running) -> None:
        name, blocks = running.request.request_id, running.blocks
        self.ended += 1
        del self.with_blocks[name]
        self.given += self.side.handoff(running.request) is not None
        if self.side.finished(running.request, blocks):
            self.held[name] = blocks
        else:
            self.pool.free_blocks(blocks)

    def _abort(self) -> None:
        """With a probability of 5 %, abort a request.

        If the request is loading, its blocks stay allocated until the load has ended.
        """
        if not self.with_blocks or self.rng.random() > 0.05:
            return
        running = self.rng.choice(list(self.with_blocks.values()))
        if any(running in step.computes for step in self.under_way):
            return
        running.request.status = Status.FINISHED_ABORTED
        loading = bool(running.loaded)
        if loading:
            self.ended += 1
            del self.with_blocks[running.request.request_id]
            self.side.finished(running.request, running.blocks)
            self.held[running.request.request_id] = running.blocks
        else:
            self._end(running)

    def _loaded(self, name: str) -> None:
        running = self.with_blocks.get(name)
        if running is not None:
            running.loaded = 0
        elif name in self.held:
            self.pool.free_blocks(self.held.pop(name))

    def _failed(self, name: str) -> None:
        running = self.with_blocks.get(name)
        if running is not None:
            self._give_back(running)
            running.request.num_computed_tokens = 0
            self.waiting.append(running.request)


def contents(tokens: list[int], page: int) -> torch.Tensor:
    """Return the expected content of a page, derived from all tokens up to the page's end."""
    value = hash(tuple(tokens[: (page + 1) * PAGE_TOKENS])) % 251
    return torch.full((PAGE_TOKENS,), value, dtype=torch.bfloat16)
