"""The one function that every rank runs, whatever launched it.

It joins the ranks, opens the cache on a gloo group of its own, replays the workload, gathers the
results, and leaves together with the others. After an error or an interruption it leaves at once and
alone: closing its connections is what tells the others. What it has counted by then is handed in
(`handing_in`).
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
from ..cli.settings import ReplaySettings
from .handing_in import Run, collect, hand_in, was_begun
from .outcome import Replayed
from .pool_memory import check_pool_memory
from .report import RankResult, make_report
from .samples import Sampler

if TYPE_CHECKING:
    from ...coordinator.collective import Collective
    from ...ranks.group.cache import Cache


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
    settings: ReplaySettings, environment: RankEnvironment, watch: Watch
) -> Replayed | None:
    """Replay on this rank. Returns what has come of it on rank 0, and None on the others.

    Once `watch.stopped` has said so, or a rank was interrupted, the report has what was counted so far,
    and the other ranks raise `Interrupted`. So does rank 0 where nothing could be counted yet.

    Raises `ConfigError` on every rank alike for settings that differ or cannot work, and `GroupError`
    if the group cannot go on.
    """
    prepare_for_mooncake()
    write_log()
    torch.set_num_threads(1)
    with joined(environment, timeout_s=settings.round_timeout_s) as meeting:
        watch.on_joined()
        agreed, requests = _agree(settings, environment, meeting.collective)
        replayed = _replay(agreed, requests, environment, meeting, watch)
        if replayed is None or not replayed.report["interrupted"]:
            # The rounds are over; nobody takes the store away while another rank still leaves.
            dist.barrier()
    return replayed


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
            own = run.to_its_end()
            packed = collective.gather(msgspec.msgpack.encode(own), JOIN_TIMEOUT_S)
            results = [msgspec.msgpack.decode(each, type=RankResult) for each in packed]
            cache.close(flush=False)
        except (Interrupted, PeerLost, CollectiveTimeout) as error:
            if not (isinstance(error, Interrupted) or was_begun(meeting.store)):
                raise
            watch.on_interrupted()
            own, results = run.so_far(), None
            hand_in(meeting.store, environment.rank, own)
    finally:
        # After an error or an interruption nobody waits for a round any more.
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
) -> Run:
    """Return the serving of all requests, which has not begun."""

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
    return Run(cache, scheduler, sampler, events)


def _device_of(settings: ReplaySettings, environment: RankEnvironment) -> torch.device:
    """Return the device of a rank's L1. Raises `ConfigError` where there is none."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device; use --device cpu")
    return torch.device("cuda", environment.local_rank % torch.cuda.device_count())


def limits_of(settings: ReplaySettings) -> EngineLimits:
    """Return the bounds of each rank's scheduler."""
    return EngineLimits(
        concurrency=settings.concurrency,
        page_tokens=settings.page_tokens,
        device_pages=settings.device_pages,
        prefill_tokens=settings.prefill_tokens,
        output_tokens_max=settings.output_tokens_max,
        verify=settings.verify,
    )
