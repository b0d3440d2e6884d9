"""A one-rank engine without vLLM: scripted requests, the plug-in's scheduler side, a real cache."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.integrations.vllm.block_events import (
    BlockEvents,
    ExtraKeys,
    HashedRequest,
    PagesRemoved,
    PagesStored,
)
from lockstep.integrations.vllm.connector_settings import HandingOver
from lockstep.integrations.vllm.groups import EVERY_TOKEN, GroupKind, PoolGroup
from lockstep.integrations.vllm.lent_blocks import HeldBlocks, LentBlocks
from lockstep.integrations.vllm.plugin_telemetry import PluginTelemetry
from lockstep.integrations.vllm.tracked import PassResult, TrackedRequest
from lockstep.integrations.vllm.weights import WeightsTracker
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import HostCacheConfig, SlidingWindow
from lockstep.ranks.protocol.network_config import Peers
from tests.kit.vllm.sent_requests import Blocks, CountedBlocks, Scheduled, Sent
from tests.kit.vllm.sides import side_of

PAGE_TOKENS = 4
BLOCKS = 64


class ChainedHasher:
    """Computes block hashes as vLLM does.

    A block's hash covers the previous block's hash, the block's tokens, and its extra keys.
    """

    def __init__(self, *, hash_tokens: int = PAGE_TOKENS, block_tokens: int = PAGE_TOKENS) -> None:
        self.hash_tokens = hash_tokens
        self.block_tokens = block_tokens

    def hash(self, before: bytes | None, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
        return sha256(repr((before, tuple(tokens), extra)).encode()).digest()

    def extra_keys(self, origin: HashedRequest, start: int, end: int) -> ExtraKeys:
        keys: list[Any] = [
            (each.identifier, each.mm_position.offset - start)
            for each in origin.mm_features
            if start < each.mm_position.offset + each.mm_position.length
            and each.mm_position.offset < end
        ]
        if origin.cache_salt and not start:
            keys.append(origin.cache_salt)
        return tuple(keys) or None

    def chain(self, request: Sent) -> list[bytes]:
        """Return the hashes of a request's full blocks, as vLLM would compute them."""
        origin = HashedRequest(None, request.mm_features, request.cache_salt)
        hashes: list[bytes] = []
        last: bytes | None = None
        step = self.hash_tokens
        for start in range(0, len(request.all_token_ids) - step + 1, step):
            tokens = request.all_token_ids[start : start + step]
            last = self.hash(last, tokens, self.extra_keys(origin, start, start + step))
            hashes.append(last)
        per_block = self.block_tokens // step
        return hashes[per_block - 1 :: per_block]


class ScriptedEngine:
    """Serves requests one after the other. All requests use the same blocks, from `first_block` on."""

    def __init__(
        self,
        store: str | None = None,
        *,
        page_tokens: int = PAGE_TOKENS,
        host_pages: int = 32,
        peers: Peers | None = None,
        handing_over: HandingOver | None = None,
        window_tokens: int = 0,
        backs_up: bool = True,
        own_embeddings: bool = True,
    ) -> None:
        """If `window_tokens` is set, some layers have a sliding window and separate memory."""
        layout = PageLayout(
            page_tokens=page_tokens,
            columns=(Column(name="kv", layers=1, heads=2, elements=2, dtype="float32"),),
        )
        shard = layout.shard(0, 1)
        self.memory, self.window = (torch.ones(BLOCKS, 2, page_tokens, 2) for _ in range(2))
        pages = {"kv": EnginePages(shard, {"kv": [self.memory]})}
        self._groups = [PoolGroup("kv", 0, GroupKind.FULL, page_tokens, EVERY_TOKEN)]
        components: list[SlidingWindow] = []
        if window_tokens:
            pages["window"] = EnginePages(shard, {"kv": [self.window]})
            self._groups.append(
                PoolGroup("window", 1, GroupKind.WINDOW, page_tokens, window_tokens)
            )
            components.append(
                SlidingWindow(
                    window_tokens=window_tokens,
                    layout=layout,
                    device_pages=0,
                    host_pages=host_pages,
                )
            )
        self._pool = CountedBlocks()
        self.hasher = ChainedHasher(hash_tokens=page_tokens, block_tokens=page_tokens)
        self.events = BlockEvents(self.hasher)
        self.cache = HostCache.open(
            HostCacheConfig(
                model="m",
                layout=layout,
                components=tuple(components),
                host_pages=host_pages,
                store=store,
                peers=peers,
            ),
            pages,
            InProcessGroup(1).member(0),
            listener=self.events.listen,
        )
        self.side = side_of(
            self.cache,
            LentBlocks(self._groups, HeldBlocks(self._pool)),
            weights=WeightsTracker(placed=self._saw),
            backs_up=backs_up,
            settings={"handing_over": handing_over or {}},
            own_embeddings=own_embeddings,
        )
        self.answer: dict[str, Any] | None = None
        """Handoff parameters of the request that finished last, for the engine that continues the
        request."""
        self.watching = PluginTelemetry(self.side, store)
        self.sources: list[dict[str, int]] = []
        """For each load, in order: the number of loaded tokens by source."""
        self._served = 0
        self.first_block = 0

    def serve(self, tokens: list[int], **attributes: Any) -> Sent:
        """Admit, load, compute and finish a request, and complete all I/O."""
        request = self.arrive(tokens, **attributes)
        self.answer_to(request)
        return request

    def arrive(self, tokens: list[int], **attributes: Any) -> Sent:
        """Create a request and report its arrival to the scheduler side. Do not serve it yet."""
        self._served += 1
        request = Sent(tokens, request_id=str(self._served), **attributes)
        self.side.arrived(request)
        return request

    def answer_to(self, request: Sent) -> None:
        """Load, compute and finish a request that has arrived, and complete all I/O."""
        self._pool.hand_out(*range(self.first_block, BLOCKS))
        loaded = self._load(request)
        scheduled = {request.request_id: request.num_tokens - loaded}
        request.num_computed_tokens = loaded
        self._pass(Scheduled(scheduled, None, Blocks(lambda _: self._tables)))
        self.watching.request_gone(request)
        handoff = self.side.handoff(request)
        self.answer = None if handoff is None else handoff.params("engine")
        if self.side.finished(request, range(BLOCKS)):
            while request.request_id not in self.rest().freed:
                pass
        self.rest()
        while self.side.gives:
            self.rest()
        self.side.settle()
        self.cache.flush()

    def write_all(self) -> None:
        """Repeat the flush until the store has every page, because writes may fail."""
        while not self.cache.flush():
            self.side.settle()

    def rest(self) -> PassResult:
        """Run a scheduler pass without requests."""
        return self._pass(Scheduled())

    def seed(self, namespace: str) -> bytes:
        """Return the root key of a namespace, from which the keys of first pages are derived."""
        return self.cache.last_key(b"", namespace)

    def published_events(self) -> list[PagesStored | PagesRemoved]:
        """Return the KV events published since the last call."""
        return list(self.events.take(self.seed))

    def _saw(self, tracked: TrackedRequest) -> None:
        pages = tracked.item_pages(lambda ids: self.cache.last_key(ids, tracked.namespace))
        self.events.saw(tracked.request, tracked.namespace, self.seed, pages)

    @property
    def _tables(self) -> tuple[Sequence[int], ...]:
        return (range(self.first_block, BLOCKS),) * len(self._groups)

    def _load(self, request: Sent) -> int:
        while (hit := self.side.hit(request, 0)) is None:
            self._pass(Scheduled())
        if hit:
            self.side.allocated(request, self._tables, hit)
            self.watching.load_begun(request, hit)
            self.sources.append(self.watching.hit_sources(request, hit))
            while request.request_id not in self._pass(Scheduled()).loaded:
                pass
        return hit

    def _pass(self, step: Scheduled) -> PassResult:
        self.cache.begin_loads()
        result = self.side.end_pass(step)
        self.watching.loads_ended(result)
        self.cache.begin_backups()
        return result


@contextmanager
def scripted(store: str | None = None, **options: Any) -> Generator[ScriptedEngine]:
    engine = ScriptedEngine(store, **options)
    try:
        yield engine
    finally:
        engine.cache.close(flush=False)
