"""SGLang's radix tree with Lockstep's host memory and storage below it.

SGLang keeps its device tree, its allocator and its pools. Lockstep reports tokens that it can load as a
host hit. When the device has space for a request including these tokens, Lockstep reserves device slots
and starts the load. SGLang asks again in later iterations. After every rank has loaded the tokens,
Lockstep inserts them into the tree. Computed tokens are backed up after SGLang has inserted them into
the tree.

SGLang's scheduler makes all calls, on every rank in the same order with the same arguments. The calls
become commands to this rank's replica. Each scheduler iteration is one step of the replica.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ...errors import InternalError
from .engine.contract import Node, SglangRequest, SlotAllocator
from .host_tier import HostTier
from .identity.kv_identity import Update
from .loads import Loads
from .matches import Matches
from .metrics import CopyCounters, HostGauge
from .pending_tree_backups import PendingTreeBackups
from .running import Kept, RunningRequests
from .scheduler_controls import SchedulerControls
from .waiting import WaitingRequests
from .weights import WeightsUpdate


class LockstepRadixCache(UnifiedRadixCache):
    """SGLang's radix tree on one rank, with this rank's Lockstep host tier below it."""

    _below: HostTier | None = None
    _queue: Sequence[SglangRequest] = ()
    """The waiting requests, in the order in which SGLang visits them in this iteration."""
    _room: SlotAllocator | None = None
    """SGLang's memory budget for the request that it visits now; None before the first visit."""
    _admitted = 0

    def __init__(self, params: CacheInitParams, below: HostTier) -> None:
        super().__init__(params)
        host = below.host
        self._waiting = WaitingRequests(host, below.prefetch_threshold_tokens)
        self._loads = Loads(self, self._match_tree, self._waiting, host, below.slots)
        allocator = self.token_to_kv_pool_allocator
        self._backups = PendingTreeBackups(host, self.unlock, allocator.size)
        self._weights = below.weights
        self._running = RunningRequests(
            self._backups, below.slots, below.write_policy, below.namespaces.names
        )
        self._matches = Matches(
            match_tree=self._match_tree,
            waiting=self._waiting,
            loads=self._loads,
            running=self._running,
            weights=below.weights,
            slots=below.slots,
        )
        self._idle = False
        self._updating = False
        """Whether a weight update is in progress. All copies have finished before it starts."""
        self.lockstep = SchedulerControls(
            host, compare_batches=below.compare_batches, write_policy=below.write_policy
        )
        """Methods that hooks and endpoints call in addition to SGLang's radix-cache methods."""
        self.token_to_kv_pool_host = HostGauge(host)
        self._copied = CopyCounters(host)
        self._below = below

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return SGLang's match, extended by a host hit: the next tokens that Lockstep can load."""
        result = super().match_prefix(params)
        return result if self._below is None else self._matches.report(result, params)

    def is_backuped(self, node: Node) -> bool:
        """Return True: a host hit may follow any node, because Lockstep finds host pages by tokens."""
        return True

    def prefetch_from_storage(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because Lockstep starts a request's prefetch at the request's first match."""

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Return whether a request may be admitted in this step."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return True
        return not (
            self._matches.is_held(waiting, waiting.prefix)
            or self._waiting.waits_for_others(waiting)
        )

    def pop_prefetch_loaded_span(self, handle: CacheRequestHandle) -> tuple[int, int | None]:
        """Return (count, first position) of the tokens that a prefetch has read; (0, None) if none."""
        waiting = self._waiting.get(handle)
        if waiting is None:
            return 0, None
        start, end = self._lower.host.fetched(waiting.name)
        return (end - start, start) if end > start else (0, None)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Node] | None:
        """Start a request's load if the device has space; return None if SGLang must ask again later.

        After the load, or if it cannot start, return (number of loaded tokens, tree node after them).
        """
        request = params.req
        assert request is not None
        waiting = self._waiting.get(request.cache_request_handle)
        device_tokens, node = request.prefix_len, request.last_node
        if waiting is None:
            return 0, node
        if self._matches.is_held(waiting, device_tokens):
            return None
        if params.best_match_node != node:
            # Return the tokens of the completed load: they are in the tree, and the match has
            # reported them as a host hit.
            return params.host_hit_length, params.best_match_node
        if self._waiting.hit(waiting, device_tokens) < params.host_hit_length:
            # Let SGLang ask again later: the backup of a retracted request has evicted host pages that
            # the match had found.
            return None
        anchor = self.lock(node)
        if not self._loads.begin(waiting, anchor, device_tokens, params.host_hit_length):
            return 0, node
        if self._room is not None:
            queue = (each.cache_request_handle for each in self._queue)
            self._loads.begin_beside(waiting, queue, self._room, self._admitted)
        with self._lower.behind_forward():
            self._lower.host.begin_loads()
        self.ongoing_load_back = dict.fromkeys(range(self._waiting.loads))
        return None

    def will_visit(self, requests: Sequence[SglangRequest]) -> None:
        """Record which waiting requests SGLang will visit in this iteration, and in which order."""
        self._queue = requests

    def visits(self, room: SlotAllocator, admitted: int) -> None:
        """Record SGLang's memory budget just before SGLang visits a waiting request.

        `admitted` is the number of requests admitted in this pass that have no row in SGLang's request
        table yet.
        """
        self._room, self._admitted = room, admitted

    def finish_storage_prefetch_admission(
        self, handle: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """Record that SGLang has admitted a request to the next batch."""
        waiting = self._waiting.admitted(handle)
        if waiting is not None:
            self._running.admitted(handle, waiting)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget a request that was aborted while it waited for admission."""
        self._waiting.forget(request)
        self._running.ended(request)

    def checkpoint(self, req: SglangRequest, *, up_to: int, **kwargs: Any) -> None:
        """Insert computed tokens into the tree, and back up those of them that are not on the host."""
        super().checkpoint(req, up_to=up_to, **kwargs)
        if req.cache_request_handle in self._running:
            slots = self.path_device_indices(req.last_node)
            self._running.computed(req, len(slots), lambda count: self._keep(req, slots, count))

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> Any:
        """Evict from the tree; if too few states become free, wait for copies and evict again.

        Copies in flight lock states, and SGLang treats a missing state slot as an error. Every rank
        calls this at the same point.
        """
        if not params.mamba_num:
            return super().evict_for_alloc(params, **kwargs)
        wanted = self._free_states + params.mamba_num
        result = super().evict_for_alloc(params, **kwargs)
        if self._free_states < wanted and (len(self._backups) or self._waiting.loads):
            self.settle()
            short = max(0, wanted - self._free_states)
            super().evict_for_alloc(EvictParams(mamba_num=short), **kwargs)
        return result

    def claim_kv_row(self, req: SglangRequest) -> bool:
        """Back up a retracted request's computed tokens before SGLang frees the request's slots."""
        if not req.finished():
            # Unlock the pages of backups that wait for host memory, because a retraction means that the
            # device is full.
            self._backups.give_up()
        if req.cache_request_handle in self._running and not req.finished():
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            with self._lower.behind_forward():
                self._running.retracted(req, row)
        return super().claim_kv_row(req)

    def on_release(self, req: SglangRequest, *, checkpointed: bool) -> None:
        """Forget a running request, because it finished or was retracted."""
        self._running.left(req.cache_request_handle)
        super().on_release(req, checkpointed=checkpointed)

    def flush_pending_backups(self) -> None:
        """Start the copies that back up the last batch's computed tokens."""
        with self._lower.behind_forward():
            self._lower.host.begin_backups()

    def check_hicache_events(self) -> None:
        """Run this iteration's step: apply the round's verdict, start copies, launch the next round."""
        # Drop the references to the requests visited in the last iteration, so that finished requests
        # are not kept alive.
        self._queue = ()
        below = self._lower
        below.host.begin_step()
        self._follow()
        with self._lower.behind_forward():
            below.host.begin_loads()
            below.host.begin_backups()
        if self.metrics_collector is not None:
            self._copied.report(self.metrics_collector)
        idle, self._idle = self._idle, False
        below.host.end_step(idle_s=below.idle_wait_s if idle else 0.0)

    def ready_to_load_host_cache(self) -> int:
        """Return -1: loads end before admission, so no forward pass waits for the load of a layer."""
        return -1

    def engine_idles(self) -> None:
        """Record that this iteration computes nothing; the next step may therefore wait for I/O."""
        self._idle = True

    def settle(self) -> None:
        """Run rounds until no copy accesses a device slot; every rank calls it at the same point."""
        if self._updating:
            return
        host, times = self._lower.host, self._lower.host.config.timeouts
        self._backups.give_up()
        with self._lower.behind_forward():
            host.begin_loads()
            host.begin_backups()
        host.step(idle_s=self._lower.idle_wait_s)
        self._follow()
        began_ms = host.inspection.agreed_ms
        patience_ms = (times.copy_s + times.quiesce_s) * 1000
        while self._waiting.loads:
            host.step(idle_s=self._lower.idle_wait_s)
            self._follow()
            if host.inspection.agreed_ms - began_ms > patience_ms:
                raise InternalError(
                    f"loads of {self._waiting.loads} requests have not completed within"
                    f" {patience_ms / 1000:.0f} s, so their slots cannot be reused"
                )
        host.finish_copies()
        self._backups.collect()

    def reset(self) -> None:
        """Empty the device tree; host memory and storage keep their pages.

        All copies finish first, because SGLang empties its slot allocator right after this call.
        """
        if self._below is not None:
            self.settle()
            self._backups.drop()
            self._forget_all()
            self._weights.tree_is_new()
        super().reset()

    def weights_may_change(self) -> None:
        """Finish all copies before a weight update, and run no round until the update has ended.

        A round needs all ranks. If an update fails on one rank alone, SGLang flushes its cache on the
        other ranks only, so a round during the flush would never complete.
        """
        self.settle()
        self._updating = True

    def weights_changed(self, taken: WeightsUpdate, update: Update) -> None:
        """Record the result of a weight update, and stop matching KV of other weights.

        Running requests are no longer backed up, because part of their KV is of the old weights.
        Nothing is cached while the device holds KV of other weights. If ranks have different results,
        every rank raises an error.
        """
        self._updating = False
        if taken is not WeightsUpdate.NOTHING:
            self._forget_all()
        self._weights.changed(taken, update, holds_nothing=self._holds_nothing)
        self.lockstep.compare_now()

    def weights_session_begins(self) -> None:
        """Stop caching until the end of a weight-update session, because weights arrive in parts."""
        self.settle()
        self._forget_all()
        self._weights.begin_session()

    def weights_session_ends(self) -> None:
        """Resume caching with the new weights after a weight-update session."""
        self._forget_all()
        self._weights.end_session(holds_nothing=self._holds_nothing)

    def adapters_were_loaded(self) -> None:
        """Hash adapters right after their load, before their files can change.

        SGLang reports a load as done when rank 0 has loaded the adapter. The round that this method
        runs delays the report until every rank has loaded the adapter.
        """
        self._lower.namespaces.look()
        self.lockstep.compare_now()

    def clear_storage_backend(self) -> bool:
        """Start new namespaces, so that no page that is now in host memory or storage matches again."""
        self._forget_all()
        self._weights.clear()
        return True

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Attach a store. Every rank calls this in the same iteration, while SGLang is idle."""
        return self.lockstep.attach(*args, **kwargs)

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Detach the store. Every rank calls this in the same iteration, while SGLang is idle."""
        return self.lockstep.detach()

    def sanity_check(self) -> None:
        """Run SGLang's check of its tree unless backups hold locks: the check reports them as leaks."""
        if not len(self._backups):
            super().sanity_check()

    def release_host_resources(self) -> None:
        """Finish pending backups together with the other ranks, then close the cache."""
        if self._below is not None:
            self._backups.finish()
            self._below.host.close()
        super().release_host_resources()

    def lockstep_state(self) -> Mapping[str, Any]:
        """Return this rank's Lockstep counters by name, for tests and debugging."""
        stats = self._lower.host.stats(rounds=0)
        return {
            "rounds": stats.rounds,
            "collectives": stats.collectives,
            "digest": stats.digest,
            "pages_corrupt": stats.pages_corrupt,
            "asked_tokens": stats.replica.asked_tokens,
            "hit_tokens": stats.replica.hit_tokens,
            "missed_tokens": stats.replica.missed_tokens,
            "loads": self._waiting.loaded,
            "loaded_tokens": self._waiting.loaded_tokens,
            "loading": self._waiting.loads,
            "retracted": self._backups.retracted,
            "keeping": len(self._backups),
        }

    @property
    def _lower(self) -> HostTier:
        assert self._below is not None
        return self._below

    @property
    def _holds_nothing(self) -> bool:
        """Whether the device holds no KV, neither in the tree nor of any request."""
        rows = self.req_to_token_pool
        kept = self.full_evictable_size() + self.full_protected_size()
        return not kept and rows.available_size() == rows.size

    @property
    def _free_states(self) -> int:
        """Number of free state slots on the device."""
        free: int = self.req_to_token_pool.mamba_allocator.available_size()
        return free

    def _keep(self, request: SglangRequest, slots: torch.Tensor, count: int) -> Kept:
        """Lock the first `count` tokens of a request in the tree, or fewer if no tree node ends there.

        `slots` are the device slots of all tokens of the request that are in the tree. The locked node
        must end where the backup ends, because a lock keeps only the window and the state at the end of
        its node.
        """
        node = request.last_node
        if count < len(slots):
            tokens = request.full_untruncated_fill_ids[:count]
            key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
            found = self._match_tree(MatchPrefixParams(key=key))
            node, count = found.last_device_node, found.device_prefix_len
        state = None
        if self.is_mamba_enabled:
            state = self.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        return self.lock(node), slots[:count], state

    def _forget_all(self) -> None:
        """Forget all waiting and running requests, so that they are neither loaded nor backed up."""
        self._waiting.forget_all()
        self._running.forget_all()

    def _follow(self) -> None:
        """Unlock the pages of completed backups, and insert the tokens of completed loads."""
        self._backups.collect()
        self._loads.follow()
        self.ongoing_load_back = dict.fromkeys(range(self._waiting.loads))
