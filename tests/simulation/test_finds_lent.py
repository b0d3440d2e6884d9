"""Planted bugs of the cache with engine-owned (lent) device pages: the simulator must find each."""

from collections.abc import Sequence
from functools import partial

from lockstep.coordinator.ballot import TransferEnded
from lockstep.ranks.protocol.orders import CopyToDevice, CopyTransfer, Fence, Order
from lockstep.ranks.replica.core.pages import PageRun
from lockstep.ranks.replica.device.lent_device import LentDevice
from lockstep.ranks.replica.operations.kinds import LoadBack, Resume
from lockstep.ranks.replica.operations.lent import Lent
from lockstep.ranks.replica.operations.loading_back import LoadingBack
from lockstep.ranks.replica.operations.requests import (
    LentRequest,
    LoadState,
    Request,
    RequestEvent,
    Requests,
)
from lockstep.ranks.replica.parts import Parts
from lockstep.ranks.replica.tree.components import Component
from lockstep.ranks.replica.tree.matching import Missing, match
from lockstep.ranks.replica.tree.node import Node, TreeIdentity
from lockstep.ranks.replica.tree.page_allocator import PageAllocator
from lockstep.ranks.replica.tree.prefixes import Prefixes
from lockstep.ranks.replica.tree.tokens import namespace_seed
from lockstep.simulation.rank.conditions import OrderWork
from lockstep.simulation.rank.copies import Copies
from lockstep.simulation.rank.epoch import Build, make_executor
from lockstep.simulation.rank.executor import SimulatedExecutor
from lockstep.simulation.world.world import ENGINE
from tests.kit.planted_bugs import assert_found, making, seeds_from, violations

TOUCHED = "transfer touches"
"""Text of the violation if a copy still uses a page that the engine has reused."""


class _FreesAtOnce(LentDevice):
    def release(self, request: Request) -> bool:
        super().release(request)
        self.leaving.pop(request.id, None)
        return True


class _FreesWhatIsStopped(LentDevice):
    def after_verdict(self) -> None:
        table = self._operation_table.in_flight
        for name, request in list(self.leaving.items()):
            if all(each not in table or table[each].ending is not None for each in request.copies):
                del self.leaving[name]
                self._outbox.freed.append(name)


class _TellsOfFailuresAtOnce(LentDevice):
    def _load_failed(self, operation: LoadBack | Resume) -> None:
        super()._load_failed(operation)
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, RequestEvent.QUIET)
            request.waits_for = None


class _FencesNothing(LentDevice):
    def fence(self, request: LentRequest) -> None:
        super().fence(request)
        orders = self._outbox.orders
        orders[:] = [order for order in orders if not isinstance(order, Fence)]


class _SavesAtOnce(LentDevice):
    def load_state(self, request: Request) -> LoadState:
        state = super().load_state(request)
        return LoadState.SAVED if state is LoadState.SAVING else state


class _LeavesAWindowOut(LentDevice):
    """Planted bug: a load restores all components except the window."""

    def _lacking(
        self, components: Sequence[Component], node: Node, starts: Sequence[int]
    ) -> list[Missing]:
        missing = super()._lacking(components, node, starts)
        return [(each, index) for each, index in missing if index != 1]


class _LendsAStateOfABegunPage(LentDevice):
    """Planted bug: the state after all tokens is stored as the state after the last whole page."""

    def _lent(self, request: LentRequest, tokens: bytes, end: int, runs: Sequence[PageRun]) -> Lent:
        del tokens
        return Lent(request.id, 0, end, runs)


class _LoadsAgain(LentDevice):
    def _restorable(self, request: LentRequest, tokens: bytes) -> int:
        return match(self._prefixes, request.place, tokens).host_tokens


class _KeepsWhatWaits(Copies):
    """Planted bug: the backup of a preempted request begins after the request's pages were reused."""

    def drop(self, operation: int) -> None:
        del operation


class _RecordsLentPages(LoadingBack):
    def _transfer(self, node: Node, component: Component, destinations: PageRun) -> CopyTransfer:
        self._journal.record("lent", *destinations)
        return super()._transfer(node, component, destinations)


class _PrunesNothing(PageAllocator):
    def prune(self, node: Node) -> None:
        del node


class _ResetsNothing(Requests):
    def reset(self, weights_version: str | None) -> None:
        self._journal.record("reset", self.generation)


class _KeepsItsKeys(Prefixes):
    """Planted bug: a reset does not change keys, so storage would serve pages from before the reset."""

    def root(self, place: TreeIdentity) -> Node:
        seed = namespace_seed(self._config.model_digest, place.namespace)
        return self.tree.roots.get(place) or self.tree.plant(place, seed)


class _HastyLoads(SimulatedExecutor):
    """Planted bug: an executor reports the end of a load when the load begins."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            if isinstance(order, CopyToDevice):
                self.conditions.say(TransferEnded(order.operation, ok=True))


class _Unfenced(SimulatedExecutor):
    """Planted bug: a backup succeeds although the engine overwrote the pages during the copy."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Fence):
                for operation in order.operations or ():
                    self.conditions.say(TransferEnded(operation, ok=True))
        super().carry_out(orders)


class _Quarantines(SimulatedExecutor):
    """Planted bug: a hanging copy quarantines engine-owned pages instead of ending the epoch."""

    def _give_up(self, work: OrderWork) -> None:
        self.conditions.give_up_quiet(work)


def test_pages_that_are_free_while_they_are_loaded_are_found() -> None:
    assert_found(violations(Build(parts=Parts(lent=_FreesAtOnce)), l1=ENGINE), TOUCHED)


def test_pages_that_are_freed_while_their_copies_quiesce_are_found() -> None:
    assert_found(violations(Build(parts=Parts(lent=_FreesWhatIsStopped)), l1=ENGINE), TOUCHED)


def test_a_failed_load_that_is_told_before_it_is_quiet_is_found() -> None:
    assert_found(violations(Build(parts=Parts(lent=_TellsOfFailuresAtOnce)), l1=ENGINE), TOUCHED)


def test_a_request_that_is_saved_before_its_copy_has_ended_is_found() -> None:
    assert_found(violations(Build(parts=Parts(lent=_SavesAtOnce)), l1=ENGINE), TOUCHED)


def test_a_window_that_is_not_loaded_is_found() -> None:
    found = violations(Build(parts=Parts(lent=_LeavesAWindowOut)), profile="gemma", l1=ENGINE)
    assert_found(found, "device window page")


def test_a_state_that_belongs_to_a_begun_page_is_found() -> None:
    build = Build(parts=Parts(lent=_LendsAStateOfABegunPage))
    found = violations(build, profile="qwen-next", l1=ENGINE)
    assert_found(found, "state page")


def test_a_fence_that_orders_nothing_is_found() -> None:
    assert_found(violations(Build(parts=Parts(lent=_FencesNothing)), l1=ENGINE), TOUCHED)


def test_a_fence_that_leaves_copies_waiting_for_the_engine_is_found() -> None:
    found = violations(Build(make=partial(make_executor, copies=_KeepsWhatWaits)), l1=ENGINE)
    assert_found(found, TOUCHED, "holds content", "holds nothing")


def test_device_pages_in_the_digest_are_found() -> None:
    found = violations(Build(parts=Parts(loading_back=_RecordsLentPages)), l1=ENGINE)
    assert_found(found, "digests differ")


def test_a_dead_tombstone_is_found() -> None:
    found = violations(Build(parts=Parts(allocator=_PrunesNothing)), l1=ENGINE)
    assert_found(found, "is dead")


@seeds_from(10)
def test_a_hit_after_a_reset_is_found(seeds: range) -> None:
    found = violations(Build(parts=Parts(requests=_ResetsNothing)), l1=ENGINE, seeds=seeds)
    assert_found(found, "right after a reset")


def test_keys_that_outlive_a_reset_are_found() -> None:
    found = violations(Build(parts=Parts(prefixes=_KeepsItsKeys)), l1=ENGINE)
    assert_found(found, "the tree offers host kv page", "under the key of content")


def test_a_request_that_loads_again_after_a_failure_is_found() -> None:
    found = violations(Build(parts=Parts(lent=_LoadsAgain)), l1=ENGINE)
    assert_found(found, "where it failed to load before")


def test_a_load_that_is_ready_too_early_is_found() -> None:
    found = violations(making(_HastyLoads, every_rank=True), l1=ENGINE)
    assert_found(found, TOUCHED, "is in use and may still be written")


@seeds_from(12)
def test_a_fenced_backup_that_counts_is_found(seeds: range) -> None:
    found = violations(making(_Unfenced, every_rank=True), l1=ENGINE, seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes it", "copies host kv page")


@seeds_from(54)
def test_an_executor_that_gives_up_no_device_is_found(seeds: range) -> None:
    found = violations(making(_Quarantines, every_rank=True), l1=ENGINE, seeds=seeds)
    assert_found(found, "is quarantined")
