"""What SGLang's tree keeps of a request while it is copied to the host."""

from collections.abc import Callable

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .engine.contract import SglangRequest
from .running import Kept


def keep(
    tree: UnifiedRadixCache,
    match: Callable[[MatchPrefixParams], MatchResult],
    request: SglangRequest,
    slots: torch.Tensor,
    count: int,
) -> Kept:
    """Lock the first `count` tokens of what the tree has of a request, in `slots`, or fewer.

    A lock keeps the window and the state that end with its node, and no other: fewer tokens take
    another node. `match` is the tree's own.
    """
    node = request.last_node
    if count < len(slots):
        tokens = request.full_untruncated_fill_ids[:count]
        key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
        found = match(MatchPrefixParams(key=key))
        node, count = found.last_device_node, found.device_prefix_len
    state = None
    if tree.is_mamba_enabled:
        state = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
    return tree.lock(node), slots[:count], state


def free_states(tree: UnifiedRadixCache) -> int:
    """Return how many slots of states are free."""
    free: int = tree.req_to_token_pool.mamba_allocator.available_size()
    return free
