"""Prefix matches reported to SGLang for waiting requests: device hits plus Lockstep's host hits.

SGLang matches a request on arrival, when it sorts the queue, and when it visits the request for
admission. If nothing has changed since a request's last match, the next match must be equal, because
SGLang would otherwise reorder the queue without a reason.
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
    """Adds Lockstep's host hits to SGLang's matches; `match_tree` is SGLang's match in its own tree."""

    match_tree: Callable[[MatchPrefixParams], MatchResult]
    waiting: WaitingRequests
    loads: Loads
    running: RunningRequests
    weights: WeightsVersions
    slots: AttentionSlots

    def report(self, result: MatchResult, params: MatchPrefixParams) -> MatchResult:
        """Return SGLang's match `result` with Lockstep's host hit added."""
        if params.req is None:
            return result
        device_tokens = result.device_prefix_len
        waiting = self._of(params.req, params.key, device_tokens)
        if waiting is None or not len(waiting):
            return result
        waiting.on_device = min(device_tokens, len(waiting))
        if self.is_held(waiting, device_tokens):
            # Report the tokens of the request's load as a host hit, because SGLang sorts the queue by
            # hits. The request cannot be admitted yet.
            coming = 0 if waiting.load is None else waiting.load.end - device_tokens
            return _with_hit(result, max(0, coming), 0, result.last_device_node)
        start, end = waiting.landed
        if start < min(device_tokens, end):
            key = params.key
            shorter = RadixKey(key.token_ids, key.extra_key, limit=start, cache_salt=key.cache_salt)
            before = self.match_tree(MatchPrefixParams(key=shorter))
            hit = device_tokens - before.device_prefix_len
            # SGLang should store a recurrent state at the position `mamba_branching_seqlen`. Copy this
            # position from the match of the whole key, because the match of the shorter key has none.
            missing = result.mamba_branching_seqlen
            found = _with_hit(before, hit, 0, result.last_device_node)
            return found._replace(mamba_branching_seqlen=missing)
        hit = self.waiting.hit(waiting, device_tokens)
        if not hit:
            return result
        window = self.loads.window_tokens(device_tokens, device_tokens + hit)
        return _with_hit(result, hit, window, result.last_device_node)

    def is_held(self, waiting: Waiting, device_tokens: int) -> bool:
        """Return whether a request must wait because a backup, prefetch or load for it is in flight."""
        if waiting.held_by is not None and waiting.held_by not in self.running.backups:
            self.waiting.go_on(waiting, device_tokens)
        return self.waiting.is_busy(waiting)

    def _of(self, request: SglangRequest, key: RadixKey, device_tokens: int) -> Waiting | None:
        """Return the request's record, created at its first match; None if it is not cached."""
        handle, count = request.cache_request_handle, self._whole_pages(request, key)
        waiting = self.waiting.get(handle)
        if waiting is not None and len(waiting) != count:
            # Drop the record: SGLang has reused the id for another request, or the request has computed
            # more tokens since its last match.
            self.waiting.forget(handle)
            waiting = None
        # Record the items' hashes even if the request is not cached, because SGLang reuses the items'
        # embeddings by hash for later requests.
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
        """Return how many of a request's tokens may be loaded, in whole pages.

        `key` may be one token too long: SGLang matches all tokens when it sorts the queue, but leaves
        one token to compute when it admits the request.
        """
        untyped: Any = request
        limit: int = untyped._compute_max_prefix_len(_tokens_of(request))  # noqa: SLF001
        unit = self.slots.page_tokens
        return min(len(key), limit) // unit * unit


def _room_of(request: SglangRequest) -> int:
    """Return the number of device slots that a request needs, including those for decoding."""
    limit: int = request.sampling_params.max_new_tokens
    return _tokens_of(request) + max(0, limit - len(request.output_ids))


def _tokens_of(request: SglangRequest) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)


def _with_hit(result: MatchResult, hit: int, window: int, best: Node) -> MatchResult:
    """Return `result` with a host hit after `best`: `hit` tokens, `window` of them window tokens."""
    return result._replace(
        host_hit_length=hit,
        swa_host_hit_length=window,
        last_host_node=best,
        best_match_node=best,
    )
