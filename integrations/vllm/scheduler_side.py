"""The plug-in's side at vLLM's scheduler: turns scheduling decisions into cache commands.

The schedulers of all ranks make the same decisions in the same step, because this module returns only
results that follow from verdicts: matches, finished loads and freed pages.

One scheduler pass is one cache step. The first query of a pass applies a verdict, and `end_pass`
launches the round. A pass with pending storage lookups runs several cache steps, because most lookups
are misses and complete within moments. Requests with such lookups then need not wait for the engine's
next pass.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.operations.requests import LoadState
from .connector_settings import ConnectorSettings
from .consumer import PrefillConsumer
from .contract import ScheduledStep, VllmRequest
from .finished_requests import FinishedRequests
from .lent_blocks import BlockTables, LentBlocks, load
from .pass_steps import PassSteps
from .pending_backups import PendingBackups
from .producer import PrefillProducer
from .request_identities import RequestIdentities
from .tracked import FinishedRequest, PassResult, TrackedRequest, ids_of
from .transfer_params import Handoff
from .weights import InFlight, WeightsTracker

ABORTED = "FINISHED_ABORTED"
"""vLLM's name of the status of an aborted request."""


class SchedulerSide:
    """Issues the commands of one rank's cache. All calls come from the engine's thread."""

    def __init__(
        self,
        cache: HostCache,
        arrivals: RequestIdentities,
        lending: LentBlocks,
        settings: ConnectorSettings,
        *,
        weights: WeightsTracker | None = None,
        loads: bool,
        backs_up: bool,
        waits_in_pass: bool = False,
    ) -> None:
        """If `waits_in_pass` is True, one scheduler pass may run several cache steps."""
        self.cache = cache
        self._arrivals = arrivals
        self._weights = weights or WeightsTracker()
        self._in_flight = settings.in_flight
        self._device_is_mixed = False
        """Whether vLLM's own prefix cache may still match blocks computed with previous weights."""
        self._page_tokens = cache.config.layout.page_tokens
        self._lending = lending
        self._loads = loads
        self._backs_up = backs_up
        self._idle_wait_s = settings.idle_wait_s
        self._steps = PassSteps(cache, settings.idle_wait_s, allowed=waits_in_pass)
        waits = settings.handing_over
        self._giving = PrefillProducer(
            cache, waits.ttl_s, has_states=lending.has_states, backs_up=backs_up
        )
        self._taking = PrefillConsumer(cache, waits.patience_s, loads=loads)
        self._scheduled: frozenset[str] = frozenset()
        """vLLM's ids of the requests that were scheduled in the last pass."""
        self._unfinished: set[str] = set()
        self._requests: dict[str, TrackedRequest] = {}
        """Maps vLLM's request id, which differs between ranks, to the plug-in's state of the request.
        """
        self._loading: dict[str, TrackedRequest] = {}
        self._backups = PendingBackups(cache, lending)
        self._leaving = FinishedRequests(cache, self._giving, self._backups)
        self._in_vain: list[TrackedRequest] = []
        """Requests whose load has failed, and which must be restarted by a command."""
        self._in_pass = False

    @property
    def idle(self) -> bool:
        """Whether the engine has no unfinished request."""
        return not self._unfinished

    @property
    def gives(self) -> bool:
        """Whether handoffs, or backups that wait for host memory, need further steps."""
        return self._giving.waits or self._backups.is_due

    @property
    def pending_frees(self) -> bool:
        """Whether a wait for copies would free blocks of finished requests."""
        return self.cache.pending_frees or self._leaving.frees

    def tracked(self, request: VllmRequest) -> TrackedRequest | None:
        """Return the plug-in's state of a request; None if the request is not cached."""
        return self._requests.get(request.request_id)

    def arrived(self, request: VllmRequest) -> None:
        """Register a new request, and start its prefetch from storage or from a prefill engine."""
        self._unfinished.add(request.request_id)
        tracked = self._arrivals.track(request)
        if tracked is None:
            return
        tracked.taken = self._taking.arrived(request.kv_transfer_params)
        self._weights.place(tracked)
        self._requests[request.request_id] = tracked
        self._prefetch(tracked)

    def hit(self, request: VllmRequest, device_tokens: int) -> int | None:
        """Return how many tokens after `device_tokens` can be loaded; None until ranks agree on it."""
        self._begin_pass()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.computed or tracked.loaded:
            # vLLM has preempted the request: otherwise it would not query a request that has computed
            # or loaded tokens. vLLM may report the preemption only later in this pass.
            self._preempted(tracked)
        # Check at every query whether vLLM has reset its prefix cache, because it may do so during a
        # pass.
        self._look_at_device()
        tracked.stale = self._device_is_mixed and device_tokens > 0
        if not self._reads(tracked):
            return 0
        taken = None if tracked.is_local_only else tracked.taken
        if taken is not None:
            self._taking.waits(taken)
        tracked.device_tokens = device_tokens
        length = tracked.loadable_tokens
        if length <= device_tokens:
            return 0
        if not self._steps.prefetched(tracked.name):
            return None
        tokens = tracked.head(length)
        found = self.cache.match_host(
            tracked.name, tokens, tracked.namespace, device_tokens=device_tokens
        )
        refused = self.cache.refused(tracked.name)
        if taken and self._taking.prefetches_again(
            taken, device_tokens + found, length, refused=refused
        ):
            self._prefetch(tracked)
            return None
        return found

    def allocated(self, request: VllmRequest, blocks: BlockTables, load_tokens: int) -> None:
        """Start to load the tokens that vLLM has accepted into `blocks`, the request's blocks."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and load_tokens:
            load(self.cache, self._lending, tracked, blocks, load_tokens)
            self._loading[request.request_id] = tracked

    def end_pass(self, step: ScheduledStep) -> PassResult:
        """Issue the commands that follow from the schedule of the pass, and launch the round."""
        self._begin_pass()
        preempted = [self._requests.get(name) for name in step.preempted_req_ids or ()]
        for each in sorted(filter(None, preempted), key=lambda each: each.number):
            if each.computed or (each.loaded and each.request.request_id not in self._loading):
                self._preempted(each)
        scheduled = [
            (tracked, tokens)
            for name, tokens in step.num_scheduled_tokens.items()
            if (tracked := self._requests.get(name)) is not None
        ]
        state = step.kv_connector_block_state if self._backs_up else None
        self._arrivals.computes(step.num_scheduled_tokens)
        for tracked, tokens in scheduled:
            if not (tracked.computed or tracked.loaded):
                # Check again whether the request is stale, because vLLM may have matched a part of a
                # block that the query's `device_tokens` do not count.
                tracked.stale |= self._device_is_mixed and tracked.request.num_computed_tokens > 0
            if not tracked.computed:
                self._admit(tracked)
            tracked.computed = True
            if state is not None and self._arrivals.trusted(tracked):
                self._backups.back_up(tracked, tokens, state)
        if self._backups:
            self._backups.try_again()
        if step.total_num_scheduled_tokens:
            self._weights.computed()
        if scheduled:
            # Add the schedule to the state digest, to detect ranks whose engines schedule differently.
            self.cache.digest_facts(
                "scheduled", *((each.number, tokens) for each, tokens in scheduled)
            )
        self._give()
        computes = step.total_num_scheduled_tokens or self._awaits_output()
        self.cache.end_step(idle_s=0.0 if computes else self._idle_wait_s)
        self._scheduled = frozenset(step.num_scheduled_tokens)
        self._in_pass = False
        return self._result()

    def handoff(self, request: VllmRequest) -> Handoff | None:
        """Return the handoff with which another engine can continue a finished request, or None.

        Call it before `finished`.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.status.name == ABORTED:
            return None
        handoff = self._giving.handoff(tracked, request)
        tracked.given = handoff.tokens if handoff is not None and handoff.source else 0
        return handoff

    def finished(self, request: VllmRequest, blocks: Sequence[int]) -> bool:
        """Forget a request; return whether vLLM must keep its blocks until they are reported free."""
        self._unfinished.discard(request.request_id)
        self._arrivals.left(request)
        tracked = self._requests.pop(request.request_id, None)
        aborted = request.status.name == ABORTED
        if aborted and not self._unfinished:
            # Wait for copies now, because an engine without requests may unmap all blocks before the
            # next step.
            self.cache.wait_for_copies()
            self._lending.held.let_go(lambda _: ())
        if tracked is None:
            return False
        loading = self._loading.pop(request.request_id, None) is not None
        # vLLM keeps no blocks for copies in two cases. A preempted request's blocks were already
        # reallocated. An aborted request's blocks are freed now, because an engine without requests
        # takes no step that could free them.
        fenced = not loading and (not blocks or aborted)
        if fenced and self._unfinished:
            # Wait for the copies here, because the engine reuses the blocks at once. The command to the
            # replica follows in the next pass, because ranks see aborts in different orders.
            self.cache.wait_for_copies(tracked.name)
            self._let_go(tracked.name)
        self._leaving.ended(FinishedRequest(tracked, loading=loading, fenced=fenced))
        return not fenced and not loading and self.cache.has_copies_in_flight(tracked.name)

    def _commit(self) -> None:
        """Issue commands for requests that finished, or whose load failed, since the last pass."""
        self._leaving.commit()
        in_vain, self._in_vain = self._in_vain, []
        for tracked in in_vain:
            if self._requests.get(tracked.request.request_id) is tracked:
                self._begin_anew(tracked)

    def settle(self) -> PassResult | None:
        """Free the blocks of finished requests if no unfinished request keeps the engine stepping.

        While such blocks are allocated, the engine cannot reset its prefix cache, which every change of
        weights requires. Most copies have finished by now, and all ranks agree on that in an extra
        step. Each rank waits for its remaining copies before the next pass or in `reset`, because no
        block is overwritten earlier.
        """
        if self._unfinished:
            return None
        self._commit()
        self._let_go()
        self._backups.finish()
        if not self._leaving.last_steps():
            return None
        result = self._result()
        freed = self._leaving.give_back(still_read=True)
        if freed:
            self._lending.held.let_go(lambda _: ())
        return replace(result, freed=(*result.freed, *ids_of(freed)))

    def answered(self) -> PassResult:
        """Apply a verdict that arrived after this pass and before the next one; return the results.

        Used if the workers are in other processes. Failed loads are reported in the next pass, because
        the engine has already read this pass's failures.
        """
        self._begin_pass()
        result = self._result(told_of_failures=False)
        if self._unfinished or not (self._leaving.lent or self._backups):
            return result
        # Free all blocks that backups of an idle engine hold, so that the engine can reset its prefix
        # cache. Wait for the copies first, because the engine may reuse the blocks.
        self.cache.wait_for_copies()
        self._lending.held.let_go(lambda _: ())
        freed = self._leaving.give_back(still_read=False)
        return replace(result, freed=(*result.freed, *ids_of(freed)))

    def reset(self) -> bool:
        """Wait for all copies; return whether pages cached so far now belong to previous weights."""
        # Wait for the copies, because vLLM unmaps all blocks after this call, even those of preempted
        # requests.
        self.cache.wait_for_copies()
        self._commit()
        self._backups.give_up()
        return self._weights.reset() and self._changed()

    def weights_are(self, version: str) -> bool:
        """Set the name of the current weights; return whether this is a change of weights."""
        self._commit()
        self.cache.digest_facts("the weights are", version)
        return self._weights.named(version) and self._changed()

    def close(self, *, failed: bool) -> None:
        """Complete the I/O in flight together with the other ranks, and close the cache.

        If this process has `failed` or the epoch has ended, the cache is abandoned without waiting for
        other ranks.
        """
        if failed or self.cache.inspection.ended_by is not None:
            self.cache.abandon()
        else:
            self._commit()
            self._backups.finish(self.cache.config.timeouts.flush_s)
            self.cache.close()

    def _begin_pass(self) -> None:
        if not self._in_pass:
            behind = self._leaving.wait_for_copies()
            self._commit()
            self.cache.begin_step()
            self._in_pass = True
            idle = self._scheduled.isdisjoint(self._unfinished)
            self._steps.begin(idle=idle, behind=behind)

    def _awaits_output(self) -> bool:
        """Return whether vLLM, which schedules ahead, has yet to process an output of the last pass."""
        before = map(self._requests.get, self._scheduled)
        return any(each is not None and each.request.num_output_placeholders for each in before)

    def _give(self) -> None:
        """Serve pages to other engines, and release requests whose serving time has ended."""
        self._giving.serve()
        for name in self._giving.over():
            self.cache.release(name)

    def _let_go(self, gone: str | None = None) -> None:
        """Free held blocks whose backup has finished, and all blocks held for the request `gone`."""
        self._lending.held.let_go(lambda name: () if name == gone else self.cache.copies(name))

    def _reads(self, tracked: TrackedRequest) -> bool:
        return (
            self._loads
            and not tracked.has_failed_enough
            and not tracked.request.skip_reading_prefix_cache
            and self._arrivals.trusted(tracked)
        )

    def _changed(self) -> bool:
        """Restart requests without device pages, with a new namespace; mark all others as stale.

        No other request can match pages that a stale request computes.
        """
        self._backups.give_up()
        for tracked in self._requests.values():
            if tracked.computed or tracked.loaded:
                tracked.stale = True
                tracked.refused = self._in_flight is InFlight.COMPUTE
            else:
                self._begin_anew(tracked)
        self._device_is_mixed = True
        self._look_at_device()
        return True

    def _look_at_device(self) -> None:
        """Check whether vLLM has reset its prefix cache since the weights changed.

        Before this reset, a request may get blocks of previous weights. The pages that it then computes
        depend on the previous and the current weights.
        """
        if self._device_is_mixed:
            # A stale request has blocks of previous weights only if `num_computed_tokens` is not 0.
            # The number is 0, for example, after a preemption.
            self._device_is_mixed = self._lending.held.can_be_found or any(
                each.stale and each.request.num_computed_tokens for each in self._requests.values()
            )

    def _begin_anew(self, tracked: TrackedRequest) -> None:
        """Restart a request without device pages, so that it matches pages of the current weights.

        The request prefetches again from storage, because a failed load removes its host pages.
        """
        self.cache.release(tracked.name)
        tracked.give_up()
        tracked.lives += 1
        self._weights.place(tracked)
        self._prefetch(tracked)

    def _admit(self, tracked: TrackedRequest) -> None:
        """Record a request that begins to compute.

        The record includes the number of tokens whose KV vLLM already has.
        """
        tokens, found = tracked.loadable_tokens, tracked.request.num_computed_tokens
        self.cache.admit(
            tracked.name, tracked.head(tokens), tracked.namespace, device_tokens=min(found, tokens)
        )

    def _prefetch(self, tracked: TrackedRequest) -> None:
        if self._reads(tracked):
            tokens = tracked.head(tracked.loadable_tokens)
            source = "" if tracked.taken is None else tracked.taken.source
            self.cache.prefetch(tracked.name, tokens, tracked.namespace, source=source)

    def _preempted(self, tracked: TrackedRequest) -> None:
        self._backups.drop(tracked.name)
        self.cache.fence(tracked.name)
        if tracked.since != self._weights.changes:
            self._begin_anew(tracked)
            return
        tracked.give_up()
        self._prefetch(tracked)

    def _result(self, *, told_of_failures: bool = True) -> PassResult:
        self._let_go()
        loaded, freed = self._leaving.freed()
        failed: list[TrackedRequest] = []
        for each, tracked in list(self._loading.items()):
            state = self.cache.load_state(tracked.name)
            in_vain = state is LoadState.FAILED or tracked.refused
            if state is LoadState.LOADING or (in_vain and not told_of_failures):
                continue
            del self._loading[each]
            loaded.append(tracked)
            if in_vain:
                failed.append(tracked)
                tracked.failures += state is LoadState.FAILED
        self._in_vain += failed
        return PassResult(ids_of(loaded), ids_of(failed), ids_of(freed))
