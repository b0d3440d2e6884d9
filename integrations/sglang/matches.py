"""What SGLang's tree is asked for, and what it is answered in place of its own answer."""

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from .contract import Node


def with_hit(result: MatchResult, hit: int, window: int, best: Node) -> MatchResult:
    """Return a match that goes on with `hit` tokens on the host, up to the node `best`."""
    return result._replace(
        host_hit_length=hit,
        swa_host_hit_length=window,
        last_host_node=best,
        best_match_node=best,
    )


def shortened(params: MatchPrefixParams, tokens: int) -> MatchPrefixParams:
    """Return what to match of the first tokens, for no request."""
    key = params.key
    shorter = RadixKey(key.token_ids, key.extra_key, limit=tokens, cache_salt=key.cache_salt)
    return MatchPrefixParams(key=shorter)
