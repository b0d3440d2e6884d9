"""The one function that every rank runs, whatever launched it.

It joins the ranks, opens the cache on a gloo group of its own, replays the workload, gathers the
results, and leaves together with the others. After an error or an interruption it leaves at once and
alone: closing its connections is what tells the others. What it has counted by then is handed in
(`handing_in`).
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..coordinator.bootstrap import agree_on_settings, agree_that_all_are_ready
from ..coordinator.collectives.torch_gloo import TorchCollective
from ..errors import CollectiveTimeout, ConfigError, PeerLost
from ..ranks.replica.check import InvariantViolation
from ..small_engine.limits import EngineLimits
from ..small_engine.scheduler import Scheduler
from ..small_engine.workload import count_requests, requests_of
from ..storage_backends.uri import without_secrets
from .environment import RankEnvironment, prepare_for_mooncake
from .first_error import was_claimed
from .handing_in import collect, hand_in, was_begun
from .interruption import Interrupted
from .pool_memory import check_pool_memory
from .progress import OnDone, nothing
from .report import RankResult, Report, make_report
from .settings import ReplaySettings

if TYPE_CHECKING:
    from ..coordinator.collective import Collective
    from ..ranks.cache import Cache

JOIN_TIMEOUT_S = 180.0
"""How long the ranks wait for each other before the first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Lets a rank and its launcher see each other while the rank runs."""

    on_done: OnDone = nothing
    """Told of the progress."""
    stopped: Callable[[], bool] = lambda: False
    """Asked in every step whether the rank shall end."""
    on_joined: Callable[[], None] = lambda: None
    """Told when the rank has met the others, before it opens anything that needs an orderly end."""
    on_open: Callable[[], None] = lambda: None
    """Told when the first request is about to be served, from where on `stopped` is asked."""
    on_interrupted: Callable[[], None] = lambda: None
    """Told when the rank has begun to leave early."""


def run_rank(
    settings: ReplaySettings,
    environment: RankEnvironment,
    store: Store,
    watch: Watch | None = None,
) -> Report | None:
    """Replay on this rank. Returns the report on rank 0 and None on the others.

    `store` is where the ranks meet (`meeting.meet`). Once `watch.stopped` has said so, or a rank was
    interrupted, the report has what was counted so far, and the other ranks raise `Interrupted`. So
    does rank 0 where nothing could be counted yet.

    Raises `ConfigError` on every rank alike for settings that differ or cannot work, and `GroupError`
    if the group cannot go on.
    """
    watch = watch or Watch()
    prepare_for_mooncake()
    torch.set_num_threads(1)
    with _joined(settings, environment, store) as collective:
        watch.on_joined()
        agreed, requests = _agree(settings, environment, collective)
        report = _replay(agreed, requests, environment, _Group(store, collective), watch)
        if report is None or not report["interrupted"]:
            # The rounds are over; nobody takes the store away while another rank still leaves.
            dist.barrier()
    return report


@contextmanager
def _joined(
    settings: ReplaySettings, environment: RankEnvironment, store: Store
) -> Generator[TorchCollective]:
    """Meet the other ranks, and leave at the end, in peace or not."""
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
    except RuntimeError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise PeerLost(
            f"rank {environment.rank} could not join the others within {JOIN_TIMEOUT_S:.0f} s: {why}"
        ) from error
    try:
        # The start has a deadline of its own, and gloo's bound must not end it, nor a round.
        patience_s = max(settings.round_timeout_s, JOIN_TIMEOUT_S)
        collective = TorchCollective.create(timeout_s=patience_s)
        try:
            yield collective
        finally:
            collective.close()
    finally:
        dist.destroy_process_group()


def _agree(
    settings: ReplaySettings, environment: RankEnvironment, collective: "Collective"
) -> tuple[ReplaySettings, int]:
    """Return the settings with the smallest pools of all ranks, and the number of requests.

    Raises the same `ConfigError` on every rank if the settings differ or one of the ranks cannot
    replay them; every line of the trace has been checked before the first request is served.
    """
    pools = agree_on_settings(
        collective,
        settings.fingerprint(),
        settings.pool_sizes(),
        JOIN_TIMEOUT_S,
        shown=without_secrets,
    )
    agreed = settings.with_sizes(pools)
    problem: str | None = None
    requests = 0
    try:
        if agreed.ranks != environment.world_size:
            raise ConfigError(
                f"--ranks is {agreed.ranks}, but {environment.world_size} ranks were started; "
                "leave --ranks out under torchrun"
            )
        check_pool_memory(agreed, ranks_here=environment.local_world_size)
        requests = count_requests(agreed.trace, agreed.requests)
    except ConfigError as error:
        problem = str(error)
    agree_that_all_are_ready(collective, problem, JOIN_TIMEOUT_S)
    return agreed, requests


@dataclass(frozen=True, slots=True)
class _Group:
    """Holds what joins the ranks: where they met, and what carries collectives."""

    store: Store
    collective: TorchCollective


def _replay(
    settings: ReplaySettings,
    requests: int,
    environment: RankEnvironment,
    group: _Group,
    watch: Watch,
) -> Report | None:
    from ..ranks.cache import Cache
    from ..ranks.opening import connected

    config = settings.cache_config()
    collective = connected(config, group.collective)
    cache = Cache.open(config, collective, device=_device(settings, environment))
    try:
        scheduler = Scheduler(
            cache,
            requests_of(settings.trace, settings.seed, settings.requests),
            _limits(settings),
            on_done=lambda done: watch.on_done(done, requests),
            stopped=watch.stopped,
        )
        run = _Run(cache, scheduler)
        watch.on_open()
        try:
            own = run.to_its_end()
            results = [RankResult.unpack(e) for e in collective.gather(own.pack(), JOIN_TIMEOUT_S)]
            cache.close(flush=False)
            interrupted = False
        except (Interrupted, PeerLost, CollectiveTimeout) as error:
            # Ranks are ended by a signal also where one of them has failed.
            failed = was_claimed(group.store)
            if failed or not (isinstance(error, Interrupted) or was_begun(group.store)):
                raise
            watch.on_interrupted()
            own, results = run.so_far(), []
            hand_in(group.store, environment.rank, own)
            interrupted = True
    finally:
        # After an error or an interruption nobody waits for a round any more.
        cache.abandon()
    if environment.rank == 0:
        if interrupted:
            results = collect(group.store, own, environment.world_size)
        return make_report(settings, results, interrupted=interrupted)
    if interrupted:
        raise Interrupted
    return None


class _Run:
    """The serving of all requests, and what was counted of it."""

    def __init__(self, cache: "Cache", scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._began = time.perf_counter()

    def to_its_end(self) -> RankResult:
        """Serve all requests and write what is to be written. Raises `Interrupted` if it is stopped."""
        if not self._scheduler.run():
            raise Interrupted
        served = time.perf_counter()
        self._cache.flush()
        return self._counted(
            flush_s=time.perf_counter() - served, violation=_violation(self._cache)
        )

    def so_far(self) -> RankResult:
        """Return what was counted. Requests and operations may be in flight."""
        return self._counted(flush_s=0.0, violation="")

    def _counted(self, *, flush_s: float, violation: str) -> RankResult:
        stats = self._cache.stats()
        return RankResult(
            counts=self._scheduler.counts,
            refusals=self._scheduler.refusals,
            steps=stats.steps,
            rounds=stats.rounds,
            transport=stats.transport,
            collectives=stats.collectives,
            round_us=stats.round_us,
            operations=stats.operations,
            bytes_moved=asdict(stats.bytes_moved),
            operations_left=len(self._cache.inspection.in_flight),
            violation=violation,
            storage_corrupt=stats.pages_corrupt,
            storage_late_calls=stats.storage_late.calls,
            storage_waited_s=stats.storage_late.waited_s,
            digest=stats.digest,
            wall_s=time.perf_counter() - self._began,
            flush_s=flush_s,
        )


def _device(settings: ReplaySettings, environment: RankEnvironment) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device; use --device cpu")
    return torch.device("cuda", environment.local_rank % torch.cuda.device_count())


def _limits(settings: ReplaySettings) -> EngineLimits:
    return EngineLimits(
        concurrency=settings.concurrency,
        page_tokens=settings.page_tokens,
        device_pages=settings.device_pages,
        prefill_tokens=settings.prefill_tokens,
        output_tokens_max=settings.output_tokens_max,
        verify=settings.verify,
    )


def _violation(cache: "Cache") -> str:
    """Return the first invariant that the replica breaks at rest, or nothing.

    No request and no operation is left that could own a page, so one that leaked shows here.
    """
    try:
        cache.inspection.check()
    except InvariantViolation as broken:
        return str(broken)
    return ""
