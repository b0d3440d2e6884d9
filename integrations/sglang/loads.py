"""Loads of pages to slots of SGLang's, and their way into its tree."""

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
from .engine.contract import Handle, Lock, Room
from .pools.slots import WINDOW_POOL, AttentionSlots
from .waiting import Load, Waiting, WaitingRequests


@dataclass(frozen=True, slots=True)
class Loads:
    """Begins the loads of requests that wait, and gives the tree what they have brought."""

    tree: UnifiedRadixCache
    match: Callable[[MatchPrefixParams], MatchResult]
    """The tree's own, without what Lockstep adds."""
    waiting: WaitingRequests
    host: HostCache
    slots: AttentionSlots

    def begin(self, waiting: Waiting, anchor: Lock, start: int, hit: int) -> bool:
        """Begin to load `hit` tokens behind the `start` that `anchor` keeps; False if there is no room.

        The lock is given back when the load has ended, or at once where it does not begin.
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
        self, first: Waiting, queue: Iterable[Handle], room: Room, admitted: int
    ) -> None:
        """Begin the loads of those that fit beside one, so that one batch computes them all.

        SGLang asks for one load in each iteration. Those that it visits after `first`, as its `queue`
        has them, are loaded with it as far as SGLang has room for all that they need, beside what the
        batch and requests that run may need, and rows for them: those `admitted` in this pass have none
        yet.
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
            # What was matched is not to be counted as room.
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
        """Give the tree what has landed on every rank, and the allocator what has failed."""
        for waiting, load, good in self.waiting.ended():
            if good:
                self._insert(waiting, load)
            else:
                self.slots.give_back(load.reserved)
            self.tree.unlock(load.anchor)

    def window_tokens(self, start: int, end: int) -> int:
        """Return how many of the last tokens of a load have windows; 0 for a model without."""
        first = self.host.needed_from(end).get(WINDOW_POOL)
        return 0 if first is None else end - max(start, first)

    def _window_of(self, waiting: Waiting) -> int:
        """Return how many tokens of a window a request keeps while it is computed."""
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
            self.slots.give_state_back(load.reserved)

    def _make_room(self, tokens: int, window_tokens: int, states: int) -> None:
        wanted = EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens, mamba_num=states)
        # The tree's own: a load does not wait for copies to end.
        UnifiedRadixCache.evict_for_alloc(self.tree, wanted)


def _still_needed(waiting: Waiting) -> int:
    """Return how many tokens a request needs on the device beside what is loaded, and is there."""
    return waiting.room - (waiting.load.end if waiting.load else 0)


def _key(waiting: Waiting, count: int) -> RadixKey:
    """Return the first tokens of a request as the tree has them."""
    tokens = waiting.prompt.tokens(waiting.tokens[: count * TOKEN_BYTES])
    ids = array("q", tokens.tobytes())
    return RadixKey(ids, waiting.extra_key, cache_salt=waiting.cache_salt)
