"""The function that every rank of a replay runs, under any launcher.

A rank joins the others, opens the cache on a gloo group, replays the workload and gathers the results.
The ranks then leave together. After an error or an interruption, a rank leaves at once, and the others
notice its closed connections. An interrupted rank sends its counters to rank 0 before it leaves
(`serving_run`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from ...coordinator.bootstrap import agree_on_settings, agree_that_all_are_ready
from ...errors import CollectiveTimeout, ConfigError, PeerLost
from ...ranks.group.member.log_level import write_log
from ...small_engine.limits import EngineLimits
from ...small_engine.scheduler import Scheduler
from ...small_engine.workload import count_requests, requests_of, spread_over
from ...storage_backends.uri import without_secrets
from ...telemetry.kept_events import KeptEvents
from ...telemetry.port import watch as watch_cache
from ..cli.environment import RankEnvironment, prepare_for_mooncake
from ..cli.interruption import Interrupted
from ..cli.meeting import JOIN_TIMEOUT_S, Meeting, joined
from ..cli.progress import OnDone, Progress, nothing
from ..cli.replay_settings import ReplaySettings
from .outcome import Replayed
from .pool_memory import check_pool_memory
from .report import RankResult, make_report
from .samples import Sampler
from .serving_run import ServingRun, collect, submit_requests, was_begun

if TYPE_CHECKING:
    from ...coordinator.collective import Collective
    from ...ranks.group.cache import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks with which a rank informs its launcher, or is stopped by it."""

    on_done: OnDone = nothing
    """Called with the replay's progress while requests are served."""
    stopped: Callable[[], bool] = lambda: False
    """Called in every step; the rank stops if the result is true."""
    on_joined: Callable[[], None] = lambda: None
    """Called when the rank has joined the others, before it opens the cache."""
    on_open: Callable[[], None] = lambda: None
    """Called before the first request is served; until this call, `stopped` is not called."""
    on_interrupted: Callable[[], None] = lambda: None
    """Called before a rank leaves early because of an interruption."""


def run_rank(
    settings: ReplaySettings, environment: RankEnvironment, watch: Watch
) -> Replayed | None:
    """Replay on this rank. Returns the result on rank 0, and None on the other ranks.

    If `watch.stopped` returns true or a rank was interrupted, rank 0 reports the counters so far, and
    the other ranks raise `Interrupted`. Rank 0 also raises `Interrupted` if nothing was counted yet.
    Raises `ConfigError` on every rank if settings differ or cannot work, and `GroupError` if the group
    cannot continue.
    """
    prepare_for_mooncake()
    write_log()
    torch.set_num_threads(1)
    with joined(environment, timeout_s=settings.round_timeout_s) as meeting:
        watch.on_joined()
        agreed, requests = _agree(settings, environment, meeting.collective)
        replayed = _replay(agreed, requests, environment, meeting, watch)
        if replayed is None or not replayed.report["interrupted"]:
            # Wait for all ranks, because the first to exit may be the rank that hosts the rendezvous
            # store.
            dist.barrier()
    return replayed


def _agree(
    settings: ReplaySettings, environment: RankEnvironment, collective: "Collective"
) -> tuple[ReplaySettings, int]:
    """Return (settings with the smallest pool sizes of all ranks, number of requests to replay).

    Checks every line of the trace first. Raises the same `ConfigError` on every rank if settings differ
    or a rank cannot replay them.
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


def _replay(
    settings: ReplaySettings,
    requests: int,
    environment: RankEnvironment,
    meeting: Meeting,
    watch: Watch,
) -> Replayed | None:
    from ...ranks.group.cache import Cache
    from ...ranks.group.opening import connected

    config = settings.cache_config()
    collective = connected(config, meeting.collective)
    events = None if settings.timeline is None else KeptEvents()
    timeline = None if events is None else events.note
    device = _device_of(settings, environment)
    cache = Cache.open(config, collective, device=device, timeline=timeline)
    try:
        watch_cache(cache, settings.metrics_port)
        run = _run_of(cache, settings, requests, watch, events)
        watch.on_open()
        results: list[RankResult] | None = None
        try:
            own = run.until_done()
            packed = collective.gather(msgspec.msgpack.encode(own), JOIN_TIMEOUT_S)
            results = [msgspec.msgpack.decode(each, type=RankResult) for each in packed]
            cache.close(flush=False)
        except (Interrupted, PeerLost, CollectiveTimeout) as error:
            if not (isinstance(error, Interrupted) or was_begun(meeting.store)):
                raise
            watch.on_interrupted()
            own, results = run.so_far(), None
            submit_requests(meeting.store, environment.rank, own)
    finally:
        # Close the cache without waiting for other ranks, because after an error they take no further
        # round.
        cache.abandon()
    interrupted = results is None
    if environment.rank == 0:
        if results is None:
            results = collect(meeting.store, own, environment.world_size)
        report = make_report(settings, results, interrupted=interrupted)
        kept = [each.timeline for each in results if each.timeline is not None]
        return Replayed(report, kept)
    if interrupted:
        raise Interrupted
    return None


def _run_of(
    cache: "Cache",
    settings: ReplaySettings,
    requests: int,
    watch: Watch,
    events: KeptEvents | None,
) -> ServingRun:
    def on_done(done: int) -> None:
        watch.on_done(Progress.of(done, requests, scheduler.counts))

    sampler = Sampler(cache, watch.stopped) if cache.rank == 0 else None
    scheduler = Scheduler(
        cache,
        spread_over(
            settings.namespaces, requests_of(settings.trace, settings.seed, settings.requests)
        ),
        limits_of(settings),
        on_done=on_done,
        stopped=watch.stopped if sampler is None else sampler.look,
    )
    return ServingRun(cache, scheduler, sampler, events)


def _device_of(settings: ReplaySettings, environment: RankEnvironment) -> torch.device:
    """Return the device of a rank's L1. Raises `ConfigError` if torch finds no CUDA device."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device; use --device cpu")
    return torch.device("cuda", environment.local_rank % torch.cuda.device_count())


def limits_of(settings: ReplaySettings) -> EngineLimits:
    """Return the engine's concurrency, page size and other limits, which are equal on every rank."""
    return EngineLimits(
        concurrency=settings.concurrency,
        page_tokens=settings.page_tokens,
        device_pages=settings.device_pages,
        prefill_tokens=settings.prefill_tokens,
        output_tokens_max=settings.output_tokens_max,
        verify=settings.verify,
    )
