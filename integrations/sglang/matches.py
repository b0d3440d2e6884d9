"""What SGLang is told of a request that waits: what the device has, and what Lockstep can bring beyond.

SGLang matches a request when it arrives, when it puts those that wait in order, and when it visits one
to admit it. The answers are to agree while nothing happens, or the order changes without a reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from .engine.contract import Node, SglangRequest
from .loads import Loads
from .pools.slots import AttentionSlots
from .running import RunningRequests, token_bytes
from .waiting import Waiting, WaitingRequests
from .weights import WeightsVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Reports matches; `match_tree` is SGLang's own match."""

    match_tree: Callable[[MatchPrefixParams], MatchResult]
    waiting: WaitingRequests
    loads: Loads
    running: RunningRequests
    weights: WeightsVersions
    slots: AttentionSlots

    def report(self, result: MatchResult, params: MatchPrefixParams) -> MatchResult:
        """Return the tree's result with the hit on the host that Lockstep adds to it."""
        if params.req is None:
            return result
        device_tokens = result.device_prefix_len
        waiting = self._of(params.req, params.key, device_tokens)
        if waiting is None or not len(waiting):
            return result
        waiting.on_device = min(device_tokens, len(waiting))
        if self.is_held(waiting, device_tokens):
            # It is not admitted yet; what is loaded for it counts where requests are put in order.
            coming = 0 if waiting.load is None else waiting.load.end - device_tokens
            return _with_hit(result, max(0, coming), 0, result.last_device_node)
        start, end = waiting.landed
        if start < min(device_tokens, end):
            key = params.key
            shorter = RadixKey(key.token_ids, key.extra_key, limit=start, cache_salt=key.cache_salt)
            before = self.match_tree(MatchPrefixParams(key=shorter))
            hit = device_tokens - before.device_prefix_len
            # The whole match alone says where SGLang is to keep a state that is missing.
            missing = result.mamba_branching_seqlen
            found = _with_hit(before, hit, 0, result.last_device_node)
            return found._replace(mamba_branching_seqlen=missing)
        hit = self.waiting.hit(waiting, device_tokens)
        if not hit:
            return result
        window = self.loads.window_tokens(device_tokens, device_tokens + hit)
        return _with_hit(result, hit, window, result.last_device_node)

    def is_held(self, waiting: Waiting, device_tokens: int) -> bool:
        """Say whether a request cannot be admitted yet: it is saved, read or loaded."""
        if waiting.held_by is not None and waiting.held_by not in self.running.backups:
            self.waiting.go_on(waiting, device_tokens)
        return self.waiting.is_busy(waiting)

    def _of(self, request: SglangRequest, key: RadixKey, device_tokens: int) -> Waiting | None:
        """Return a request that waits, which is known from its first match on."""
        handle, count = request.cache_request_handle, self._whole_pages(request, key)
        waiting = self.waiting.get(handle)
        if waiting is not None and len(waiting) != count:
            # Another one of the same name, or the same one after it has computed more.
            self.waiting.forget(handle)
            waiting = None
        # Also of a request that is not cached: SGLang keeps embeddings of its items under their names.
        prompt = None if waiting else self.weights.namespaces.items_of(request)
        if waiting is None and prompt is not None and self.weights.may_cache:
            namespace = self.weights.namespaces.of(request)
            if namespace is not None:
                waiting = Waiting(
                    token_bytes(key.token_ids, count, prompt),
                    namespace,
                    prompt=prompt,
                    extra_key=request.extra_key,
                    cache_salt=request.cache_salt,
                    room=_room_of(request) + self.slots.page_tokens,
                    held_by=self.running.saved_by(handle),
                )
                self.waiting.arrive(handle, waiting, device_tokens)
        return waiting

    def _whole_pages(self, request: SglangRequest, key: RadixKey) -> int:
        """Return how many tokens can be brought.

        SGLang matches all of them to put requests in order, and leaves one to compute to admit them.
        """
        asked: Any = request
        limit: int = asked._compute_max_prefix_len(_tokens_of(request))  # noqa: SLF001
        unit = self.slots.page_tokens
        return min(len(key), limit) // unit * unit


def _room_of(request: SglangRequest) -> int:
    """Return how many tokens a request has, with those that it may decode."""
    limit: int = request.sampling_params.max_new_tokens
    return _tokens_of(request) + max(0, limit - len(request.output_ids))


def _tokens_of(request: SglangRequest) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)


def _with_hit(result: MatchResult, hit: int, window: int, best: Node) -> MatchResult:
    """Return a match that goes on with `hit` tokens on the host, up to the node `best`."""
    return result._replace(
        host_hit_length=hit,
        swa_host_hit_length=window,
        last_host_node=best,
        best_match_node=best,
    )
