"""Loads host pages into SGLang's device slots, and inserts the loaded tokens into SGLang's tree."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.tree.tokens import TOKEN_BYTES
from .engine.contract import Handle, Lock, SlotAllocator
from .pools.slots import WINDOW_POOL, AttentionSlots
from .waiting import Load, Waiting, WaitingRequests


@dataclass(frozen=True, slots=True)
class Loads:
    """Starts loads of host pages for waiting requests; inserts the loaded tokens into the tree."""

    tree: UnifiedRadixCache
    match: Callable[[MatchPrefixParams], MatchResult]
    """Function that matches a prefix in SGLang's tree only, without Lockstep's host hits."""
    waiting: WaitingRequests
    host: HostCache
    slots: AttentionSlots

    def begin(self, waiting: Waiting, anchor: Lock, start: int, hit: int) -> bool:
        """Start to load the `hit` tokens after the first `start` tokens of a request.

        Return False if too few slots are free. `anchor` is a lock on the first `start` tokens, which
        are on the device. The lock is released when the load ends, or at once if the load does not
        start.
        """
        end = start + hit
        window = self.window_tokens(start, end)
        reserved = self.slots.reserve(hit, window, self._make_room)
        if reserved is None:
            self.tree.unlock(anchor)
            return False
        self.waiting.begin_load(waiting, Load(start, end, reserved, anchor))
        return True

    def begin_beside(
        self, first: Waiting, queue: Iterable[Handle], room: SlotAllocator, admitted: int
    ) -> None:
        """Start loads of other waiting requests that fit too, so that one batch computes all of them.

        SGLang requests only one load per iteration: that of the request `first`. This method also
        starts loads for requests that SGLang visits after `first`, in the order of `queue`. Such a load
        needs free slots beyond those that the batch and the running requests still need, and a free row
        of SGLang's request table. `admitted` is the number of requests that were admitted in this pass
        and will take one row each.
        """
        rows = self.tree.req_to_token_pool.available_size() - admitted - 1
        promised, promised_windows = _still_needed(first), self._window_of(first)
        for waiting in self.waiting.after(first, queue):
            if rows <= 0:
                return
            if not len(waiting) or self.waiting.is_busy(waiting):
                continue
            match = self.match(MatchPrefixParams(key=_key(waiting, len(waiting))))
            start, window = match.device_prefix_len, self._window_of(waiting)
            # Lock the matched path first. Otherwise `room` would count the path's tokens as evictable.
            anchor = self.tree.lock(match.last_device_node)
            fits = (
                promised + waiting.room - start <= room.remaining_total
                and promised_windows + 2 * window <= room.remaining_swa
            )
            hit = self.waiting.hit(waiting, start) if fits else 0
            if not hit:
                self.tree.unlock(anchor)
            if not fits or (hit and not self.begin(waiting, anchor, start, hit)):
                return
            rows, promised_windows = rows - 1, promised_windows + window
            promised += _still_needed(waiting) if hit else waiting.room - start

    def follow(self) -> None:
        """Insert the tokens of completed loads into SGLang's tree; free the slots of failed loads."""
        for waiting, load, good in self.waiting.ended():
            if good:
                self._insert(waiting, load)
            else:
                self.slots.give_back(load.reserved)
            self.tree.unlock(load.anchor)

    def window_tokens(self, start: int, end: int) -> int:
        """Return how many of a load's last tokens need window slots; 0 for a model without windows."""
        first = self.host.needed_from(end).get(WINDOW_POOL)
        return 0 if first is None else end - max(start, first)

    def _window_of(self, waiting: Waiting) -> int:
        """Return the number of window slots that a request needs while its tokens are computed."""
        return self.window_tokens(0, len(waiting))

    def _insert(self, waiting: Waiting, load: Load) -> None:
        self.slots.hand_over(load.reserved)
        before = self.tree.path_device_indices(load.anchor.node)[: load.start]
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
        result = self.tree.insert(params)
        if result.mamba_exist:
            self.slots.free_state(load.reserved)

    def _make_room(self, tokens: int, window_tokens: int, states: int) -> None:
        wanted = EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens, mamba_num=states)
        # Call SGLang's own method: the override in `LockstepRadixCache` would also wait for copies.
        UnifiedRadixCache.evict_for_alloc(self.tree, wanted)


def _still_needed(waiting: Waiting) -> int:
    """Return how many device slots a request needs after its load, including those for decoding."""
    return waiting.room - (waiting.load.end if waiting.load else 0)


def _key(waiting: Waiting, count: int) -> RadixKey:
    """Return the first `count` tokens of a request as a key for a match in SGLang's tree."""
    tokens = waiting.prompt.tokens(waiting.tokens[: count * TOKEN_BYTES])
    ids = array("q", tokens.tobytes())
    return RadixKey(ids, waiting.extra_key, cache_salt=waiting.cache_salt)
