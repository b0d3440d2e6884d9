"""A group whose ranks step one after the other in one thread, with executors scripted by the test.

Caches, replicas, ballots and rounds are the real ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lockstep.coordinator.ballot import (
    Answered,
    Landed,
    Progress,
    Quiesced,
    TransferEnded,
)
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.coordinator.proposal import Proposal, Readiness
from lockstep.coordinator.stop_policy import StopPolicy
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.base import ExecutorCounts
from lockstep.ranks.executor.restorable import restorable
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.group.member.group_rank import Substitutes
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.group.member.request_log import RequestLog
from lockstep.ranks.protocol.config import (
    Bounds,
    CacheConfig,
    HostCacheConfig,
    RankCacheConfig,
    SlidingWindow,
    Timeouts,
)
from lockstep.ranks.protocol.orders import (
    AttachStore,
    Cancel,
    CopyToDevice,
    CopyToHost,
    DetachStore,
    Direction,
    Fence,
    Fetch,
    Fork,
    LookUp,
    Order,
    Put,
    Serve,
)
from lockstep.ranks.protocol.replica_config import ReplicaConfig

T = TypeVar("T")
OrderT = TypeVar("OrderT", bound=Order)
CacheT = TypeVar("CacheT", bound=RankCache)

PAGE_TOKENS = 4
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="k", layers=1, heads=4, elements=1),)
)


def prompt(pages: int, *, start: int = 0) -> list[int]:
    """Return the consecutive tokens from `start` that fill `pages` pages."""
    return list(range(start, start + pages * PAGE_TOKENS))


def prompt_of(first: int, pages: int) -> list[int]:
    """Return tokens that fill `pages` pages. Prompts with different `first` share no prefix."""
    return prompt(pages, start=first * 1000)


def window_of(pages: int, *, device_pages: int, host_pages: int) -> SlidingWindow:
    """Return a sliding-window component whose window is `pages` pages long."""
    return SlidingWindow(
        window_tokens=pages * PAGE_TOKENS,
        layout=LAYOUT,
        device_pages=device_pages,
        host_pages=host_pages,
    )


class ScriptedExecutor:
    """An executor that records orders, and reports only progress that the test scripts."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.begun: list[Direction] = []
        """The directions passed to `begin_copies`, in order."""
        self.begun_after: list[int] = []
        """For each call of `begin_copies`: the number of orders recorded before the call."""
        self.reports: list[Progress] = []
        self.ill: str | None = None
        self.staged: dict[int, Readiness | str] = {}
        """For each proposal's digest: the readiness that this executor reports, or an error. Set by the
        test."""
        self.waited_s = 0.0
        """Sum of the seconds that callers asked this executor to wait. No real time passes."""
        self.closed = False

    def carry_out(self, orders: Sequence[Order]) -> None:
        self.orders.extend(orders)

    def begin_copies(self, direction: Direction) -> None:
        self.begun.append(direction)
        self.begun_after.append(len(self.orders))

    def progress(self) -> list[Progress]:
        progress, self.reports = self.reports, []
        return progress

    def wait(self, timeout_s: float) -> None:
        self.waited_s += timeout_s

    def trouble(self) -> str | None:
        return self.ill

    def stage(self, proposal: Proposal) -> None:
        self.staged[proposal.digest] = Readiness.STAGED

    def readiness(self, proposal: Proposal) -> Readiness | str:
        return self.staged[proposal.digest]

    def unstage(self, proposal: Proposal) -> None:
        del self.staged[proposal.digest]

    def counts(self) -> ExecutorCounts:
        return ExecutorCounts()

    def serving_address(self) -> str:
        """Return no peer address, because this executor serves no pages."""
        return ""

    def close(self) -> None:
        self.closed = True

    def given(self, kind: type[OrderT]) -> list[OrderT]:
        """Return the recorded orders of one type without removing them."""
        return [order for order in self.orders if isinstance(order, kind)]

    def take(self, kind: type[OrderT]) -> list[OrderT]:
        """Remove the recorded orders of one type and return them."""
        taken = self.given(kind)
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return taken

    def complete_only(self, kind: type[Order]) -> None:
        """Report success for the orders of one type; leave the other orders pending."""
        others = [order for order in self.orders if not isinstance(order, kind)]
        self.orders = [order for order in self.orders if isinstance(order, kind)]
        self.complete()
        self.orders = others

    def fail(self) -> None:
        moves: list[Put | CopyToHost | CopyToDevice] = []
        moves += self.take(Put)
        moves += self.take(CopyToHost)
        moves += self.take(CopyToDevice)
        self.reports += [TransferEnded(order.operation, ok=False) for order in moves]

    def complete(self, stored: Callable[[bytes], bool] = lambda key: False) -> None:
        """Report success for every order. A lookup finds the keys for which `stored(key)` is true."""
        orders, self.orders = self.orders, []
        for order in orders:
            match order:
                case LookUp(operation=operation, needs=needs):
                    present = [[stored(key) for key in need.keys] for need in needs]
                    self.reports.append(Answered(operation, *restorable(order, present)))
                case Fetch(operation=operation, transfers=transfers):
                    landed = sum(len(each.keys) for each in transfers)
                    self.reports.append(Landed(operation, landed))
                case Put() | CopyToHost() | CopyToDevice():
                    self.reports.append(TransferEnded(order.operation, ok=True))
                case Fence(operations=operations):
                    self.reports += [
                        TransferEnded(operation, ok=True) for operation in operations or ()
                    ]
                case Cancel(operation=operation):
                    self.reports.append(Quiesced(operation))
                case Fork() | Serve() | AttachStore() | DetachStore():
                    pass


class InTurn(Generic[CacheT]):
    """A group of ranks driven in one thread; every rank gets every command."""

    kind: type[CacheT]
    default_device_pages: int

    def __init__(
        self,
        ranks: int = 2,
        *,
        depth: int = 0,
        device_pages: int | None = None,
        host_pages: int = 64,
        store: bool = True,
        stop_policy: StopPolicy | None = None,
        bounds: Bounds | None = None,
        timeouts: Timeouts | None = None,
        engine_pages: int = 0,
        logs: bool = False,
        **settings: Any,
    ) -> None:
        """`settings` go to `CacheConfig`, and `engine_pages` goes to `ReplicaConfig`.

        If `logs` is True, each rank has a request log, to which the test can add requests.
        """
        pages = self.default_device_pages if device_pages is None else device_pages
        owned: dict[str, Any] = {"device_pages": pages} if pages else {}
        config: RankCacheConfig = (CacheConfig if pages else HostCacheConfig)(
            model="test",
            layout=LAYOUT,
            **owned,
            host_pages=host_pages,
            store="memory://test" if store else None,
            stop_policy=stop_policy or StopPolicy(),
            bounds=bounds or Bounds(),
            timeouts=timeouts or Timeouts(),
            pipeline_depth=depth,
            **settings,
        )
        self.depth = depth
        self._engine_pages = engine_pages
        self.now_ms = [1000] * ranks
        self.group = InProcessGroup(ranks)
        self.executors = [ScriptedExecutor() for _ in range(ranks)]
        self.logs = [RequestLog() for _ in range(ranks)] if logs else None
        self.caches = [self._cache(rank, config) for rank in range(ranks)]

    def _cache(self, rank: int, config: RankCacheConfig) -> CacheT:
        replica_config = ReplicaConfig.of(
            config,
            pools=config.pool_sizes(),
            model_digest=b"model",
            engine_pages=self._engine_pages,
        )
        cache = self.kind(
            config,
            self.group.member(rank),
            self.executors[rank],
            replica_config,
            substitutes=Substitutes(clock_ms=lambda: self.now_ms[rank]),
        )
        if self.logs is not None:
            cache.take_requests(self.logs[rank])
        return cache

    def every(self, command: Callable[[CacheT], T]) -> T:
        """Run a command on every rank; return its result, which must be equal on all ranks."""
        answers = [command(cache) for cache in self.caches]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def report(self, *progress: Progress) -> None:
        """Make every rank's executor report the same progress; the next step processes it."""
        for executor in self.executors:
            executor.reports += progress

    def take_operation(self, kind: type[LookUp | Fetch | Put | CopyToHost | CopyToDevice]) -> int:
        """Remove the only order of a type from every rank; return its operation id.

        All ranks must have the same operation id.
        """
        (operation,) = {
            order.operation for executor in self.executors for order in executor.take(kind)
        }
        return operation

    def free(self, tier: int) -> int:
        """Return how many full-attention pages are free on a tier; check that all ranks agree."""
        return self.every(lambda cache: cache.inspection.prefixes.allocator.pools[tier][0].free)

    def available(self, tier: int) -> list[int]:
        """Return each pool's number of free or evictable pages on a tier; check that ranks agree."""
        allocator = self.caches[0].inspection.prefixes.allocator
        pools = range(len(allocator.pools[tier]))
        return self.every(
            lambda cache: [cache.inspection.prefixes.allocator.available(tier, at) for at in pools]
        )

    def step(self) -> None:
        """Run one step on every rank, then check that all replicas are valid and equal."""
        halves = [RankCache.open_round, RankCache.close_round]
        for half in halves if self.depth == 0 else reversed(halves):
            for cache in self.caches:
                half(cache)
        self.check()

    def pass_time(self, seconds: float) -> None:
        """Advance every rank's clock by `seconds` and run a step."""
        self.now_ms = [now + int(1000 * seconds) for now in self.now_ms]
        self.step()

    def check(self) -> None:
        """Check the invariants of every replica, and that the digests of all replicas are equal."""
        for cache in self.caches:
            cache.inspection.check()
        assert len({cache.inspection.digest for cache in self.caches}) == 1
        assert len({cache.inspection.state_digest for cache in self.caches}) == 1

    def complete(self, stored: Callable[[bytes], bool] = lambda key: False) -> None:
        """Complete all ordered I/O successfully, and run one step."""
        for executor in self.executors:
            executor.complete(stored)
        self.step()

    def settle(self, stored: Callable[[bytes], bool] = lambda key: False) -> None:
        """Complete all ordered I/O successfully, and step until no operation is in flight."""
        for _ in range(100):
            self.complete(stored)
            if self.caches[0].inspection.idle:
                return
        raise AssertionError("operations are still in flight after 100 steps")

    def phase(self, operation: int) -> str:
        """Return the phase of an operation, or DONE if the replicas no longer have the operation."""
        return self.every(
            lambda cache: (
                cache.inspection.in_flight[operation].phase.name
                if operation in cache.inspection.in_flight
                else "DONE"
            )
        )


class RanksInTurn(InTurn[Cache]):
    """A group whose caches own their device pages."""

    kind = Cache
    default_device_pages = 64

    def compute(self, request: str, tokens: list[int], *, cached: int = 0) -> None:
        """Admit, compute, insert and release a request, and complete its I/O."""
        self.every(lambda cache: cache.load_back(request, tokens[:-1], reserve_tokens=len(tokens)))
        self.settle()
        self.every(lambda cache: cache.insert(request, tokens))
        self.every(lambda cache: cache.release(request))
        self.settle()

    def publish(self, request: str, tokens: list[int]) -> None:
        """Compute, insert and release a request that has no cached tokens; leave its I/O pending."""
        self.every(lambda cache: cache.load_back(request, [], reserve_tokens=len(tokens)))
        self.every(lambda cache: cache.insert(request, tokens))
        self.every(lambda cache: cache.release(request))


class HostRanksInTurn(InTurn[HostCache]):
    """A group whose engine owns the device pages."""

    kind = HostCache
    default_device_pages = 0
