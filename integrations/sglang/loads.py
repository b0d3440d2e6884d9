"""Loads of pages to slots of SGLang's, and their way into its tree."""

from array import array
from collections.abc import Callable

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ...ranks.host_cache import HostCache
from .contract import Node
from .slots import WINDOW_POOL, Slots
from .waiting import Load, Waiting, WaitingRequests


class Loads:
    """Begins the loads of requests that wait, and gives the tree what they have brought."""

    def __init__(
        self,
        tree: UnifiedRadixCache,
        match: Callable[[MatchPrefixParams], MatchResult],
        waiting: WaitingRequests,
        host: HostCache,
        slots: Slots,
        *,
        chunk_tokens: int,
    ) -> None:
        """`match` is the tree's own, without what Lockstep adds.

        A batch computes `chunk_tokens` at the most; 0 stands for no bound.
        """
        self._tree = tree
        self._match = match
        self._waiting = waiting
        self._host = host
        self._slots = slots
        self._chunk_tokens = chunk_tokens

    def begin(self, waiting: Waiting, node: Node, start: int, hit: int) -> bool:
        """Begin to load `hit` tokens behind the `start` that `node` ends; False if there is no room."""
        end = start + hit
        anchor = self._tree.lock(node)
        window = self.window_tokens(start, end)
        reserved = self._slots.reserve(hit, window, self._make_room)
        if reserved is None:
            self._tree.unlock(anchor)
            return False
        self._waiting.begin_load(waiting, Load(start, end, reserved, anchor))
        return True

    def begin_beside(self, first: Waiting) -> None:
        """Begin the loads of those that fit beside one, so that one batch computes them all.

        SGLang asks for one load in each iteration. Those that came after `first` are loaded with it as
        far as the device has room for all that they need, and rows for them. What running requests have
        yet to decode is not counted: a load for which that leaves no room has come too early, and what
        it has brought stays in the tree as long as nobody needs its slots.
        """
        tree = self._tree
        room = tree.token_to_kv_pool_allocator.available_size() + tree.full_evictable_size()
        # Who was admitted before `first` has its slots not yet, and nobody takes a load's away.
        room -= first.room - len(first) + self._chunk_tokens
        rows = tree.req_to_token_pool.available_size() - 1
        for waiting in self._waiting.after(first):
            if rows <= 0 or room <= 0:
                return
            if not len(waiting) or self._waiting.is_busy(waiting):
                continue
            match = self._match(MatchPrefixParams(key=_key(waiting, len(waiting))))
            start = match.device_prefix_len
            rows, room = rows - 1, room - (waiting.room - start)
            hit = self._waiting.hit(waiting, start) if room >= 0 else 0
            if hit and not self.begin(waiting, match.last_device_node, start, hit):
                return

    def follow(self) -> None:
        """Give the tree what has landed on every rank, and the allocator what has failed."""
        for waiting, load, good in self._waiting.ended():
            if good:
                self._insert(waiting, load)
            else:
                self._slots.give_back(load.reserved)
            self._tree.unlock(load.anchor)

    def window_tokens(self, start: int, end: int) -> int:
        """Return how many of the last tokens of a load have windows; 0 for a model without."""
        first = self._host.needed_from(end).get(WINDOW_POOL)
        return 0 if first is None else end - max(start, first)

    def _insert(self, waiting: Waiting, load: Load) -> None:
        self._slots.hand_over(load.reserved)
        before = self._tree.path_device_indices(load.anchor.node)[: load.start]
        params = InsertParams(
            key=_key(waiting, load.end),
            value=torch.cat([before, load.reserved.slots.to(before)]),
            prev_prefix_len=load.start,
        )
        if load.reserved.window is not None:
            window_from = load.end - load.reserved.window.numel()
            params.set_evicted_seqlen(ComponentType.SWA, window_from)
        if load.reserved.state is not None:
            params.mamba_value = load.reserved.state
        result = self._tree.insert(params)
        if result.mamba_exist:
            self._slots.give_state_back(load.reserved)

    def _make_room(self, tokens: int, window_tokens: int, states: int) -> None:
        wanted = EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens, mamba_num=states)
        # The tree's own: a load does not wait for copies to end.
        UnifiedRadixCache.evict_for_alloc(self._tree, wanted)


def _key(waiting: Waiting, count: int) -> RadixKey:
    """Return the first tokens of a request as the tree has them."""
    tokens = np.frombuffer(waiting.tokens, dtype=np.int32)[:count].astype(np.int64)
    ids = array("q", tokens.tobytes())
    return RadixKey(ids, waiting.extra_key, cache_salt=waiting.cache_salt)
