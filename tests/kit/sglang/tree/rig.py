"""One rank's radix cache on SGLang's allocator and pools, without a model or scheduler.

A test makes the scheduler's cache calls itself, in SGLang's order, with SGLang's own request objects.
Instead of a forward pass, known numbers are written to the pools.
"""

import threading
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from lockstep.coordinator.collective import Collective
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import ComponentConfig, HostCacheConfig, WritePolicy
from lockstep.ranks.protocol.orders import KV_POOL, Direction
from tests.kit.sglang.host_tier_ranks import KnownAdapters, named_by_version
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_bytes import KINDS, numbers_of

LONGEST = 1024
"""Largest number of tokens in a request."""

MEM_CACHE = "sglang.srt.mem_cache"
COMMON, BASE = f"{MEM_CACHE}.common", f"{MEM_CACHE}.base_prefix_cache"
BATCH = "sglang.srt.managers.schedule_batch"
OURS = "lockstep.integrations.sglang"


class Rig:
    """One rank with `pages` device pages.

    Create all ranks of a group concurrently, because each rank waits for the others.
    """

    def __init__(
        self,
        collective: Collective,
        *,
        kind: str = "attention",
        pages: int = 32,
        host_pages: int = 64,
        **settings: Any,
    ) -> None:
        self.kind = KINDS[kind]
        self.rank, self.ranks = collective.rank, collective.world_size
        self.page_tokens = self.kind.page_tokens
        self.size = pages * self.page_tokens
        self.pool = self.kind.make(self.size, self.ranks)
        self.rows = self._rows()
        self.allocator = here.of(f"{MEM_CACHE}.allocator", "PagedTokenToKVPoolAllocator")(
            size=self.size,
            page_size=self.page_tokens,
            dtype=self.pool.dtype,
            device="cpu",
            kvcache=self._kv_cache(),
            need_sort=False,
        )
        self.host = self._open(collective, host_pages, settings)
        self.cache = self._cache()
        self._names = count()

    def _rows(self) -> Any:
        """Return SGLang's request table."""
        return here.of(f"{MEM_CACHE}.memory_pool", "ReqToTokenPool")(
            size=16, max_context_len=LONGEST, device="cpu", enable_memory_saver=False
        )

    def _kv_cache(self) -> Any:
        """Return SGLang's KV pool object."""
        return self.pool

    def _open(self, collective: Collective, host_pages: int, settings: dict[str, Any]) -> HostCache:
        engine_pools = here.of(f"{OURS}.pools.engine_layout", "engine_pools")
        pools = engine_pools(self._kv_cache(), self.page_tokens, self.ranks)
        config = HostCacheConfig(
            model="numbers",
            layout=pools[KV_POOL].layout,
            host_pages=host_pages,
            components=self._components(pools),
            **settings,
        )
        lent = {name: pool.lend(self.rank, self.ranks) for name, pool in pools.items()}
        return HostCache.open(config, lent, collective)

    def _components(self, pools: dict[str, Any]) -> tuple[ComponentConfig, ...]:
        """Return the settings of the cache's components, except full attention."""
        return ()

    def _lent(self) -> Any:
        """Return the device slots as the object that Lockstep's radix cache takes."""
        return here.of(f"{OURS}.pools.slots", "AttentionSlots")(self.allocator, self.page_tokens)

    def _kept(self) -> dict[str, Any]:
        """Return SGLang's settings that select the components of the tree."""
        kinds = here.of(f"{MEM_CACHE}.unified_cache.component_type", "ComponentType")
        return {"tree_components": (kinds.FULL,)}

    def _cache(self) -> Any:
        namespaces = here.of(f"{OURS}.namespaces", "Namespaces")(
            self.host, KnownAdapters(), page_tokens=self.page_tokens
        )
        weights = here.of(f"{OURS}.weights", "WeightsVersions")
        below = here.of(f"{OURS}.host_tier", "HostTier")(
            host=self.host,
            slots=self._lent(),
            namespaces=namespaces,
            weights=weights(self.host, namespaces, "w0", named_by_version),
            write_policy=WritePolicy.WRITE_THROUGH,
            prefetch_threshold_tokens=0,
            idle_wait_s=0.05,
            compare_batches=False,
            stream=None,
        )
        params = here.of(f"{MEM_CACHE}.cache_init_params", "CacheInitParams")(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_tokens,
            eviction_policy="lru",
            **self._kept(),
        )
        return here.of(f"{OURS}.radix_cache", "LockstepRadixCache")(params, below)

    # Methods for the life of a request, from its arrival to its end.

    def request(self, tokens: Sequence[int], *, items: Any = None, **keys: str) -> Any:
        """Create a waiting request and match it once; `keys` may have `extra_key` and `cache_salt`.

        `items` are SGLang's multimodal inputs. In `tokens`, the inputs' ids must already have replaced
        the placeholders.
        """
        request = here.of(BATCH, "Req")(
            rid=f"request {next(self._names)}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=here.of("sglang.srt.sampling.sampling_params", "SamplingParams")(
                temperature=0, max_new_tokens=64
            ),
            **keys,
        )
        request.multimodal_inputs = items
        self.arrive(request)
        return request

    def arrive(self, request: Any) -> None:
        """Match a request's prefix, as SGLang does at arrival and after a retraction."""
        request.init_next_round_input(self.cache, cow_mamba=False)

    def admit(self, request: Any, *, promised: int = 0) -> bool:
        """Try to admit a request to the batch; return False if the test must retry in a later step.

        `promised` tokens of the device pool are reserved for other requests of the batch.
        """
        handle, cache = request.cache_request_handle, self.cache
        if not cache.check_prefetch_progress(handle):
            return False
        request.init_next_round_input(cache)
        room = self.allocator.create_prefill_budget(cache, num_mixed_decode_tokens=promised)
        cache.visits(room, admitted=0)
        kept = cache.lock(request.last_node)
        try:
            if request.host_hit_length > 0 and not self._load(request):
                return False
            request.lock = cache.lock(request.last_node)
        finally:
            cache.unlock(kept)
        cache.finish_storage_prefetch_admission(handle, fulfilled_tokens=0, reason=None)
        here.of(f"{MEM_CACHE}.allocation", "alloc_req_slots")(self.rows, [request], cache)
        prefix = request.prefix_len
        row = request.kv.req_pool_idx
        self.rows.write((row, slice(0, prefix)), cache.prefix_device_indices(request).int())
        request.kv.kv_allocated_len = request.kv.kv_committed_len = prefix
        return True

    def _load(self, request: Any) -> bool:
        params = here.of(BASE, "InitLoadBackParams")(
            best_match_node=request.best_match_node,
            host_hit_length=request.host_hit_length,
            req=request,
        )
        loaded = self.cache.init_load_back(params)
        if loaded is None:
            return False
        tokens, request.last_node = loaded
        assert tokens in (0, request.host_hit_length)
        request.prefix_len += tokens
        request.kv.cache_protected_len = request.prefix_len
        return True

    def extend(self, request: Any, end: int | None = None) -> None:
        """Compute a request's prompt up to `end` as one chunk, and store the chunk in the tree."""
        request.extend_end = len(request.full_untruncated_fill_ids) if end is None else end
        self._compute(request, request.extend_end)
        here.of(COMMON, "checkpoint_kv_cache")(request, self.cache)
        self.cache.flush_pending_backups()

    def generate(self, request: Any, tokens: Sequence[int]) -> None:
        """Append output tokens to a request, and write KV for these tokens."""
        request.output_ids.extend(tokens)
        self._compute(request, len(request.origin_input_ids) + len(request.output_ids))

    def _compute(self, request: Any, end: int) -> None:
        start, row = request.kv.kv_allocated_len, self.rows.req_to_token[request.kv.req_pool_idx]
        slots = self._slots(row[start - 1] if start else None, start, end)
        row[start:end] = slots.int()
        request.kv.kv_allocated_len = request.kv.kv_committed_len = end
        known = [*request.origin_input_ids, *request.output_ids][:end]
        self.write(slots, numbers_of(known)[start:])

    def _slots(self, last: torch.Tensor | None, start: int, end: int) -> torch.Tensor:
        """Allocate slots for tokens `start` to `end` of a request.

        `last` is the slot of the preceding token. The free slots after it in the same page are used
        first.
        """
        unit = self.page_tokens
        rest = min(-start % unit, end - start)
        continued = torch.arange(1, rest + 1) + (0 if last is None else int(last))
        beyond = -(-(end - start - rest) // unit) * unit
        short = beyond - self.allocator.available_size()
        if short > 0:
            self.cache.evict_for_alloc(here.of(BASE, "EvictParams")(num_tokens=short))
        taken = self.allocator.alloc(beyond)
        assert taken is not None, "the device has no room"
        return torch.cat([continued, taken])[: end - start]

    def end(self, request: Any, *, checkpoint: bool = True) -> None:
        """Finish a request. If `checkpoint` is True, the request's tokens stay in the tree."""
        request.finished_reason = here.of(BATCH, "FINISH_LENGTH")(len(request.output_ids))
        here.of(COMMON, "release_kv_cache")(request, self.cache, checkpoint=checkpoint)
        self.cache.flush_pending_backups()

    def retract(self, request: Any) -> None:
        """Retract a request: remove it from the batch, free its slots, and queue it again."""
        here.of(COMMON, "release_kv_cache")(request, self.cache, checkpoint=False)
        request.reset_for_retract()
        self.arrive(request)

    def abort(self, request: Any) -> None:
        aborted = here.of(BASE, "CacheRequestOutcome").ABORT
        self.cache.finish(request.cache_request_handle, aborted)

    def step(self) -> None:
        """Run a scheduler iteration in which nothing is computed."""
        self.cache.engine_idles()
        self.cache.check_hicache_events()

    # Methods that run whole requests on one rank.

    def admitted(self, request: Any) -> Any:
        for _ in range(200):
            self.step()
            if self.admit(request):
                return request
        raise AssertionError(f"{request.rid} is not admitted")

    def serve(self, tokens: Sequence[int], *, items: Any = None) -> int:
        """Serve a prompt completely; return how many of its tokens were cached."""
        request = self.admitted(self.request(tokens, items=items))
        cached: int = request.prefix_len
        self.extend(request)
        self.end(request)
        return cached

    def settled(self) -> None:
        for _ in range(200):
            self.step()
            if not self.cache.lockstep_state()["keeping"]:
                return
        raise AssertionError("backups do not end")

    # Methods that block copies or make them fail.

    @contextmanager
    def copies_held(self, direction: Direction) -> Generator[Callable[[], None]]:
        """Block this rank's copies in a direction until the end of the `with` block.

        Yields a function that unblocks the copies earlier.
        """
        ended = threading.Event()
        with self._before_copies(direction, lambda: ended.wait(60)):
            try:
                yield ended.set
            finally:
                ended.set()

    @contextmanager
    def copies_failing(
        self, direction: Direction, fails: Callable[[], bool] = lambda: True
    ) -> Generator[None]:
        """Make this rank's copies in a direction fail during the `with` block if `fails()` is true."""

        def fail() -> None:
            if fails():
                raise RuntimeError("planted: this copy fails")

        with self._before_copies(direction, fail):
            yield

    @contextmanager
    def _before_copies(self, direction: Direction, act: Callable[[], object]) -> Generator[None]:
        host: Any = self.host
        copies = host._executor._copies
        copy = copies._copy

        def act_and_copy(job: Any) -> None:
            if job.direction is direction:
                act()
            copy(job)

        copies._copy = act_and_copy
        try:
            yield
        finally:
            copies._copy = copy

    # Methods that look at the tree, the allocator, and the content of slots.

    def match(self, tokens: Sequence[int]) -> Any:
        """Match a sequence of tokens without a request; return SGLang's result."""
        return self.cache.match_prefix(here.of(BASE, "MatchPrefixParams")(key=self.key(tokens)))

    def matched(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens match on the device."""
        found: int = self.match(tokens).device_prefix_len
        return found

    def evict(self, tokens: int) -> None:
        self.cache.evict(here.of(BASE, "EvictParams")(num_tokens=tokens))

    def evict_all(self) -> None:
        """Complete all backups, evict all unlocked tokens, and overwrite all free slots."""
        self.settled()
        self.evict(self.size)
        self.spoil()

    def slots_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the device slots of tokens; all of them must be in the tree."""
        found = self.match(tokens)
        assert found.device_prefix_len == len(tokens)
        slots: torch.Tensor = self.cache.path_device_indices(found.last_device_node)
        return slots

    def write(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write KV to slots in place of a forward pass; `numbers` identify the tokens."""
        self.kind.write(self.pool, slots, self.kind.expected(numbers, self.rank, self.ranks))

    def wrong(self, tokens: Sequence[int]) -> list[str]:
        """Check these tokens' slots in the tree; return the columns and layers that are wrong."""
        return self._wrong(self.slots_of(tokens), tokens)

    def wrong_of(self, request: Any) -> list[str]:
        """Check the slots of a running request; return the columns and layers that are wrong."""
        count = request.kv.kv_committed_len
        slots = self.rows.req_to_token[request.kv.req_pool_idx][:count].long()
        return self._wrong(slots, [*request.origin_input_ids, *request.output_ids][:count])

    def _wrong(self, slots: torch.Tensor, tokens: Sequence[int]) -> list[str]:
        held = self.kind.held(self.pool, slots)
        expected = self.kind.expected(numbers_of(tokens), self.rank, self.ranks)
        assert held.keys() == expected.keys()
        return [name for name in held if not torch.equal(held[name], expected[name])]

    def spoil(self) -> None:
        """Overwrite all free slots, so that a later read of them is detected."""
        pages = self.allocator.get_all_free_pages()[:, None] * self.page_tokens
        slots = (pages + torch.arange(self.page_tokens)).reshape(-1)
        self.write(slots, torch.full((len(slots),), 4711))

    def sizes(self) -> tuple[int, int, int]:
        """Return how many device tokens are free, evictable, and protected, in this order."""
        cache = self.cache
        return (
            self.allocator.available_size(),
            cache.evictable_size(),
            cache.protected_size(),
        )

    def lost(self) -> int:
        """Return how many slots are neither free nor in the tree; running requests have such slots."""
        return self.size - sum(self.sizes())

    def all_lost(self) -> tuple[int, ...]:
        """Return, for each pool, how many slots are neither free nor in the tree."""
        return (self.lost(),)

    def close(self) -> None:
        """Close this rank. All ranks must be closed concurrently."""
        self.cache.release_host_resources()

    def key(self, tokens: Sequence[int]) -> Any:
        """Return the key that the tree uses for these tokens; the key has no salt."""
        return here.of(f"{MEM_CACHE}.radix_cache", "RadixKey")(array("q", tokens), None)
