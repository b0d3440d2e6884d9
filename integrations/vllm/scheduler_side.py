"""The scheduler's half of the plug-in: it turns what vLLM's scheduler does into commands.

Every rank has a scheduler that decides the same in the same step, since everything that it hears
from here follows from verdicts: a hit that every rank has, a load that has ended on every rank, pages
that every rank has done with. So all ranks give the same commands.

One pass of the scheduler is one step of the cache. The first question of a pass applies a verdict,
and the pass ends with `end_pass`, which launches the round. A pass that asks for a request which
storage is still being asked about is some steps: what storage mostly has to say is that it has nothing,
which is known sooner than the engine would come round again.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.operations.requests import LoadState
from .arrivals import Arrivals
from .contract import ScheduledStep, VllmRequest
from .giving import Giving
from .leaving import Leaving
from .lending import BlockTables, Lending, load
from .pass_steps import PassSteps
from .pending_backups import PendingBackups
from .settings import ConnectorSettings
from .taking import Taking
from .tracked import Ended, PassResult, TrackedRequest, ids_of
from .transfer_params import Handoff
from .weights import InFlight, Weights

ABORTED = "FINISHED_ABORTED"
"""What vLLM calls the status of a request that was ended from outside."""


class SchedulerSide:
    """Gives the commands of one rank's cache. All calls come from the engine's thread."""

    def __init__(
        self,
        cache: HostCache,
        arrivals: Arrivals,
        lending: Lending,
        settings: ConnectorSettings,
        *,
        weights: Weights | None = None,
        loads: bool,
        backs_up: bool,
        waits_in_pass: bool = False,
    ) -> None:
        """With `waits_in_pass` a pass may be several steps, which a cache needs no engine step for."""
        self.cache = cache
        self._arrivals = arrivals
        self._weights = weights or Weights()
        self._in_flight = settings.in_flight
        self._device_is_mixed = False
        """Whether the engine's own prefix cache may find blocks of former weights."""
        self._page_tokens = cache.config.layout.page_tokens
        self._lending = lending
        self._loads = loads
        self._backs_up = backs_up
        self._idle_wait_s = settings.idle_wait_s
        self._steps = PassSteps(cache, settings.idle_wait_s, allowed=waits_in_pass)
        waits = settings.handing_over
        self._giving = Giving(cache, waits.ttl_s, has_states=lending.has_states, backs_up=backs_up)
        self._taking = Taking(cache, waits.patience_s, loads=loads)
        self._scheduled: frozenset[str] = frozenset()
        """What the last pass let compute, by the engine's ids."""
        self._unfinished: set[str] = set()
        self._requests: dict[str, TrackedRequest] = {}
        """Requests by the engine's id, which is another one on each rank."""
        self._loading: dict[str, TrackedRequest] = {}
        self._backups = PendingBackups(cache, lending)
        self._leaving = Leaving(cache, self._giving, self._backups)
        self._in_vain: list[TrackedRequest] = []
        """Requests whose load was in vain, and which have not begun anew yet."""
        self._in_pass = False

    @property
    def idle(self) -> bool:
        """Whether the engine has no request that is not finished."""
        return not self._unfinished

    @property
    def gives(self) -> bool:
        """Whether steps bring more of what other engines go on with, or of what waits for room."""
        return self._giving.waits or self._backups.is_due

    @property
    def pending_frees(self) -> bool:
        """Whether waiting frees blocks of requests that have ended."""
        return self.cache.pending_frees or self._leaving.frees

    def tracked(self, request: VllmRequest) -> TrackedRequest | None:
        """Return what is remembered of a request; None for one that may not be cached."""
        return self._requests.get(request.request_id)

    def arrived(self, request: VllmRequest) -> None:
        """Note a new request, and begin to bring what storage has of it."""
        self._unfinished.add(request.request_id)
        tracked = self._arrivals.track(request)
        if tracked is None:
            return
        tracked.taken = self._taking.arrived(request.kv_transfer_params)
        self._weights.place(tracked)
        self._requests[request.request_id] = tracked
        self._prefetch(tracked)

    def hit(self, request: VllmRequest, device_tokens: int) -> int | None:
        """Return how many tokens can be loaded beyond `device_tokens`; None: ask again later."""
        self._begin_pass()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.computed or tracked.loaded:
            # Asked again, so it was preempted, perhaps between passes: this one says so at its end.
            self._preempted(tracked)
        # With each question: a pass may have begun with the outputs of the step before, and the engine
        # may have emptied its prefix cache since.
        self._look_at_device()
        tracked.stale = self._device_is_mixed and device_tokens > 0
        if not self._reads(tracked):
            return 0
        taken = None if tracked.is_of_no_other_engine else tracked.taken
        if taken is not None:
            self._taking.waits(taken)
        tracked.device_tokens = device_tokens
        length = tracked.loadable_tokens
        if length <= device_tokens:
            return 0
        if not self._steps.prefetched(tracked.name):
            return None
        tokens = tracked.head(length)
        found = self.cache.hit(tracked.name, tokens, tracked.namespace, device_tokens=device_tokens)
        refused = self.cache.refused(tracked.name)
        if taken and self._taking.asks_again(taken, device_tokens + found, length, refused=refused):
            self._prefetch(tracked)
            return None
        return found

    def allocated(self, request: VllmRequest, blocks: BlockTables, load_tokens: int) -> None:
        """Begin the load of what the engine takes of its hit, into the request's `blocks`."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and load_tokens:
            load(self.cache, self._lending, tracked, blocks, load_tokens)
            self._loading[request.request_id] = tracked

    def end_pass(self, step: ScheduledStep) -> PassResult:
        """Give the commands that follow from what was scheduled, and launch the round."""
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
                # Where the engine finds a part of a block, it says nothing of that when it asks.
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
            # Ranks whose engines decide differently are told so by the digest.
            self.cache.witness("scheduled", *((each.number, tokens) for each, tokens in scheduled))
        self._give()
        computes = step.total_num_scheduled_tokens or self._awaits_output()
        self.cache.end_step(idle_s=0.0 if computes else self._idle_wait_s)
        self._scheduled = frozenset(step.num_scheduled_tokens)
        self._in_pass = False
        return self._result()

    def handoff(self, request: VllmRequest) -> Handoff | None:
        """Return where another engine can go on after a request that ends here; None for any other.

        To be asked before `finished`.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.status.name == ABORTED:
            return None
        handoff = self._giving.handoff(tracked, request)
        tracked.given = handoff.tokens if handoff is not None and handoff.source else 0
        return handoff

    def finished(self, request: VllmRequest, blocks: Sequence[int]) -> bool:
        """Forget a request; say whether its blocks must stay as they are until they are freed."""
        self._unfinished.discard(request.request_id)
        self._arrivals.left(request)
        tracked = self._requests.pop(request.request_id, None)
        aborted = request.status.name == ABORTED
        if aborted and not self._unfinished:
            # An engine that has nothing left to do may unmap all its blocks before it steps again.
            self.cache.keep_off()
            self._lending.held.let_go(lambda _: ())
        if tracked is None:
            return False
        loading = self._loading.pop(request.request_id, None) is not None
        # Blocks of a preempted request were given away with nobody asking. Those of an aborted one
        # could be held back, but an engine that aborts its last request never steps to free them.
        fenced = not loading and (not blocks or aborted)
        if fenced and self._unfinished:
            # At once, since the engine has its blocks at once. What the replica is to hear of it
            # waits for the next pass, since ranks hear of aborts in different orders.
            self.cache.keep_off(tracked.name)
            self._let_go(tracked.name)
        self._leaving.ended(Ended(tracked, loading=loading, fenced=fenced))
        return not fenced and not loading and self.cache.lends(tracked.name)

    def _commit(self) -> None:
        """Give the commands for what has ended or failed since the last pass, by order of arrival."""
        self._leaving.commit()
        in_vain, self._in_vain = self._in_vain, []
        for tracked in in_vain:
            if self._requests.get(tracked.request.request_id) is tracked:
                self._begin_anew(tracked)

    def settle(self) -> PassResult | None:
        """Give back blocks that are held back, if nothing else keeps the engine stepping.

        An engine that stops with blocks held back cannot drop its own prefix cache, which it must be
        able to whenever its weights change. Copies have mostly ended by now, and a step lets all ranks
        know it. Nobody waits for backups that have not: that is for the next pass, or for `reset`,
        since nothing overwrites a block before. A block of a rank is overwritten by that rank alone,
        so each has to wait for its own copies only.
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
        """Apply a verdict that has just come, ahead of the next pass; return what follows from it.

        For a cache that decides for workers elsewhere. Loads that have failed are told of with the next
        pass, since the engine has read by now which ones failed in this one.
        """
        self._begin_pass()
        result = self._result(told_of_failures=False)
        if self._unfinished or not (self._leaving.lent or self._backups):
            return result
        # An engine that has nothing left to do gets all its blocks back at once, so that it can drop
        # its prefix cache; whatever it does with them next begins with this fence.
        self.cache.keep_off()
        self._lending.held.let_go(lambda _: ())
        freed = self._leaving.give_back(still_read=False)
        return replace(result, freed=(*result.freed, *ids_of(freed)))

    def reset(self) -> bool:
        """Return when no copy touches a block; say whether all that is cached is of former weights."""
        # The engine may have preempted what it is about to unmap, with nobody asking.
        self.cache.keep_off()
        self._commit()
        self._backups.give_up()
        return self._weights.reset() and self._changed()

    def weights_are(self, version: str) -> bool:
        """Take `version` for the name of the weights from now on; say whether they are others."""
        self._commit()
        self.cache.witness("the weights are", version)
        return self._weights.named(version) and self._changed()

    def close(self, *, failed: bool) -> None:
        """Write out what is on its way, together with the other ranks, and end.

        A process that has `failed`, or whose epoch is over, ends alone: nobody else ends with it.
        """
        if failed or self.cache.inspection.ended_by is not None:
            self.cache.abandon()
        else:
            self._commit()
            self._backups.finish(self.cache.config.timeouts.flush_s)
            self.cache.close()

    def _begin_pass(self) -> None:
        if not self._in_pass:
            behind = self._leaving.keep_off()
            self._commit()
            self.cache.begin_step()
            self._in_pass = True
            idle = self._scheduled.isdisjoint(self._unfinished)
            self._steps.begin(idle=idle, behind=behind)

    def _awaits_output(self) -> bool:
        """Say whether the pass before still computes: an engine that schedules ahead waits for that."""
        before = map(self._requests.get, self._scheduled)
        return any(each is not None and each.request.num_output_placeholders for each in before)

    def _give(self) -> None:
        """Serve what other engines go on with, and let go of that whose time is over."""
        self._giving.serve()
        for name in self._giving.over():
            self.cache.release(name)

    def _let_go(self, gone: str | None = None) -> None:
        """Give the engine back what its backups have read; all of a request's that is `gone`."""
        self._lending.held.let_go(lambda name: () if name == gone else self.cache.copies(name))

    def _reads(self, tracked: TrackedRequest) -> bool:
        return (
            self._loads
            and not tracked.has_failed_enough
            and not tracked.request.skip_reading_prefix_cache
            and self._arrivals.trusted(tracked)
        )

    def _changed(self) -> bool:
        """Let requests that hold nothing begin anew, and keep to the others what they have."""
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
        """Take note that the engine has emptied its own prefix cache since the weights changed.

        Until it has, it may give requests blocks of former weights, and what they compute is of both.
        """
        if self._device_is_mixed:
            # One that waits without tokens, as after a preemption, has no blocks.
            self._device_is_mixed = self._lending.held.can_be_found or any(
                each.stale and each.request.num_computed_tokens for each in self._requests.values()
            )

    def _begin_anew(self, tracked: TrackedRequest) -> None:
        """Let a request that holds nothing find what there is of the weights of now.

        What a failed load has read is not on the host any more, and comes from storage again.
        """
        self.cache.release(tracked.name)
        tracked.give_up()
        tracked.lives += 1
        self._weights.place(tracked)
        self._prefetch(tracked)

    def _admit(self, tracked: TrackedRequest) -> None:
        """Count a request that begins to compute, with what the engine has of it by now."""
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
