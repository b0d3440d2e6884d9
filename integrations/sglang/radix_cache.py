"""SGLang's radix tree with Lockstep's host memory and storage below it.

The tree on the device stays SGLang's, and so do its allocator and its pools. What Lockstep can bring is
reported as a hit on the host. When a request fits with it, slots are taken, the load begins, and SGLang
is told to come back; once every rank has it, it joins the tree. What a request has computed is backed
up when the tree has taken it over.

All calls come from SGLang's scheduler, on every rank in the same order with the same arguments. They
give commands to this rank's replica, and each iteration of the scheduler is one step of it.
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
from .below import Below
from .controls import Controls
from .engine.contract import Node, Room, SglangRequest
from .identity.kv_identity import Update
from .lent_backups import LentBackups
from .loads import Loads
from .matches import Matches
from .metrics import CopyCounters, HostGauge
from .running import Kept, RunningRequests
from .waiting import WaitingRequests
from .weights import Taken


class LockstepRadixCache(UnifiedRadixCache):
    """One rank's tree, above one rank's replica."""

    _below: Below | None = None
    _queue: Sequence[SglangRequest] = ()
    """The requests that wait, in the order in which SGLang visits them in this iteration."""
    _room: Room | None = None
    """What SGLang has for the request that it visits."""
    _admitted = 0

    def __init__(self, params: CacheInitParams, below: Below) -> None:
        super().__init__(params)
        host = below.host
        self._waiting = WaitingRequests(host, below.prefetch_threshold_tokens)
        self._loads = Loads(self, self._match_tree, self._waiting, host, below.slots)
        allocator = self.token_to_kv_pool_allocator
        self._backups = LentBackups(host, self.unlock, allocator.size)
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
        """Whether an update of the weights runs, before which all copies have ended."""
        self.lockstep = Controls(host, witness=below.witness, write_policy=below.write_policy)
        """What hooks and endpoints ask of Lockstep beside the calls of a cache."""
        self.token_to_kv_pool_host = HostGauge(host)
        self._copied = CopyCounters(host)
        self._below = below

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match the tree, and report as a hit on the host what Lockstep can bring beyond it."""
        result = super().match_prefix(params)
        return result if self._below is None else self._matches.report(result, params)

    def is_backuped(self, node: Node) -> bool:
        """Say yes: Lockstep asks by tokens, so any node will do to go on from."""
        return True

    def prefetch_from_storage(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the prefetch has begun with the request's first match."""

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Say whether a request may be admitted in this step."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return True
        return not (
            self._matches.is_held(waiting, waiting.prefix)
            or self._waiting.waits_for_others(waiting)
        )

    def pop_prefetch_loaded_span(self, handle: CacheRequestHandle) -> tuple[int, int | None]:
        """Return how many tokens storage has brought for a request, and from which one on."""
        waiting = self._waiting.get(handle)
        if waiting is None:
            return 0, None
        start, end = self._lower.host.fetched(waiting.name)
        return (end - start, start) if end > start else (0, None)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Node] | None:
        """Begin to load a request that fits. None: SGLang asks again in a later step."""
        request = params.req
        assert request is not None
        waiting = self._waiting.get(request.cache_request_handle)
        device_tokens, node = request.prefix_len, request.last_node
        if waiting is None:
            return 0, node
        if self._matches.is_held(waiting, device_tokens):
            return None
        if params.best_match_node != node:
            # It is in the tree already; SGLang counts it as what it was.
            return params.host_hit_length, params.best_match_node
        if self._waiting.hit(waiting, device_tokens) < params.host_hit_length:
            # A request that was retracted since has taken host pages.
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
        """Take note of the order in which SGLang is going to visit the requests that wait."""
        self._queue = requests

    def visits(self, room: Room, admitted: int) -> None:
        """Take note of what SGLang has for the request that it visits next, and those behind it.

        So many are `admitted` in this pass, and have no rows yet.
        """
        self._room, self._admitted = room, admitted

    def finish_storage_prefetch_admission(
        self, handle: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """Take note that a request is in the batch."""
        waiting = self._waiting.admitted(handle)
        if waiting is not None:
            self._running.admitted(handle, waiting)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Forget a request that is not going to be admitted."""
        self._waiting.forget(request)
        self._running.ended(request)

    def checkpoint(self, req: SglangRequest, *, up_to: int, **kwargs: Any) -> None:
        """Let the tree take over what was computed, and back up what of it is not on the host."""
        super().checkpoint(req, up_to=up_to, **kwargs)
        if req.cache_request_handle in self._running:
            slots = self.path_device_indices(req.last_node)
            self._running.computed(req, len(slots), lambda count: self._keep(req, slots, count))

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> Any:
        """Evict, and end the copies that keep states where SGLang would find no slot for one.

        It takes that for an error. Every rank comes here at the same point.
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
        """Save what a request has computed that is retracted: SGLang gives its slots away at once."""
        if not req.finished():
            # The device is full, so nothing is kept that only waits.
            self._backups.give_up()
        if req.cache_request_handle in self._running and not req.finished():
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            with self._lower.behind_forward():
                self._running.retracted(req, row)
        return super().claim_kv_row(req)

    def on_release(self, req: SglangRequest, *, checkpointed: bool) -> None:
        """Forget a request that has ended, or was retracted."""
        self._running.left(req.cache_request_handle)
        super().on_release(req, checkpointed=checkpointed)

    def flush_pending_backups(self) -> None:
        """Begin the copies of what the last batch has computed."""
        with self._lower.behind_forward():
            self._lower.host.begin_backups()

    # Once in each iteration of the scheduler, on every rank.

    def check_hicache_events(self) -> None:
        """Run the step of this iteration: apply a verdict, follow it, launch the next round."""
        # What was visited may have ended, and is not to be kept alive.
        self._queue = ()
        below = self._lower
        below.host.begin_step()
        self._follow()
        with self._lower.behind_forward():
            below.host.begin_loads()
            below.host.begin_backups()
        if self.metrics_collector is not None:
            self._copied.tell(self.metrics_collector)
        idle, self._idle = self._idle, False
        below.host.end_step(idle_s=below.idle_wait_s if idle else 0.0)

    def ready_to_load_host_cache(self) -> int:
        """Say that no layer is waited for: a load has ended before its request is admitted."""
        return -1

    def engine_idles(self) -> None:
        """Take note that this iteration computes nothing, so that the next step may wait for I/O."""
        self._idle = True

    # Flush, new weights, sleep, the end.

    def settle(self) -> None:
        """Run rounds until no copy touches a slot; every rank calls it at the same point."""
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
                    f"a load of {self._waiting.loads} requests has not ended within"
                    f" {patience_ms / 1000:.0f} s, and its slots cannot be given to others"
                )
        host.finish_copies()
        self._backups.collect()

    def reset(self) -> None:
        """Empty the tree on the device; host memory and storage keep what they have.

        SGLang empties its allocator right after, so nothing may touch a slot any more.
        """
        if self._below is not None:
            self.settle()
            self._backups.drop()
            self._forget_all()
            self._weights.tree_is_new()
        super().reset()

    def weights_may_change(self) -> None:
        """End all copies before an update of the weights, within which no round runs.

        It may fail on one rank, where SGLang then does not flush and the others do.
        """
        self.settle()
        self._updating = True

    def weights_changed(self, taken: Taken, update: Update) -> None:
        """Find nothing any more that was computed with other weights than those of now.

        Requests that run are not backed up any more: they have KV of both. Nothing is cached while the
        device has KV of other weights. Ranks on which the update has ended in other ways end here.
        """
        self._updating = False
        if taken is not Taken.NOTHING:
            self._forget_all()
        self._weights.changed(taken, update, holds_nothing=self._holds_nothing)
        self.lockstep.compare_now()

    def weights_session_begins(self) -> None:
        """Cache nothing until the session ends in which the weights come in parts."""
        self.settle()
        self._forget_all()
        self._weights.begin_session()

    def weights_session_ends(self) -> None:
        """Go on with the weights that the session has brought."""
        self._forget_all()
        self._weights.end_session(holds_nothing=self._holds_nothing)

    def adapters_were_loaded(self) -> None:
        """Look at adapters as soon as they are loaded, before their files can change.

        SGLang answers when rank 0 has loaded them; it is to answer when every rank has read them.
        """
        self._lower.namespaces.look()
        self.lockstep.compare_now()

    def clear_storage_backend(self) -> bool:
        """Find nothing any more of what is in host memory and storage now."""
        self._forget_all()
        self._weights.clear()
        return True

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Use a store from now on; SGLang calls it on every rank in the same, idle iteration."""
        return self.lockstep.attach(*args, **kwargs)

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Use the store no more; SGLang calls it on every rank in the same, idle iteration."""
        return self.lockstep.detach()

    def sanity_check(self) -> None:
        """Check the tree, unless backups hold locks, which the check takes for a leak."""
        if not len(self._backups):
            super().sanity_check()

    def release_host_resources(self) -> None:
        """Write out what is on its way, together with the other ranks, and end."""
        if self._below is not None:
            self._backups.finish()
            self._below.host.close()
        super().release_host_resources()

    def lockstep_state(self) -> Mapping[str, Any]:
        """Return what this rank has done so far; for tests and for whoever hunts a fault."""
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
    def _lower(self) -> Below:
        assert self._below is not None
        return self._below

    @property
    def _holds_nothing(self) -> bool:
        """Whether neither the tree nor a request has any KV."""
        rows = self.req_to_token_pool
        kept = self.full_evictable_size() + self.full_protected_size()
        return not kept and rows.available_size() == rows.size

    @property
    def _free_states(self) -> int:
        """How many slots of states are free."""
        free: int = self.req_to_token_pool.mamba_allocator.available_size()
        return free

    def _keep(self, request: SglangRequest, slots: torch.Tensor, count: int) -> Kept:
        """Lock the first `count` tokens of what the tree has of a request, in `slots`, or fewer.

        A lock keeps the window and the state that end with its node, and no other: fewer tokens take
        another node.
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
        """Neither load nor back up for any request that is known by now."""
        self._waiting.begin_anew()
        self._running.begin_anew()

    def _follow(self) -> None:
        """Do what a verdict has brought about."""
        self._backups.collect()
        self._loads.follow()
        self.ongoing_load_back = dict.fromkeys(range(self._waiting.loads))
