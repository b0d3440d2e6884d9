"""A replay by Ray actors, one for each rank, running the same worker function as processes do.

The driver hosts the store in which the ranks meet.
"""

from ..cli.exits import say
from ..cli.interruption import Interrupted, ignore_signals, note_signals, raise_on_signals
from ..cli.meeting import host_store
from ..cli.progress import progress_bar
from ..cli.settings import ReplaySettings
from .options import LaunchChoice
from .outcome import conclude
from .ray_actors import START_TIMEOUT_S, RankOutcome, place_ranks, worst
from .ray_cluster import RayCluster, ray_cluster
from .timelines import write_timeline


def launch_with_ray(settings: ReplaySettings, choice: LaunchChoice) -> int:
    """Replay on `settings.ranks` actors; return the status to exit with.

    Raises `Interrupted` after SIGINT or SIGTERM, when no rank is left and what was counted is told,
    and `ConfigError` if Ray is not installed, cannot be reached or cannot place the actors.
    """
    raise_on_signals()
    try:
        with ray_cluster(choice.ray_address, ranks=settings.ranks) as cluster:
            outcomes = _run_actors(cluster, settings, choice.ranks_per_node)
    finally:
        ignore_signals()
    wrong = worst(outcomes)
    if wrong is not None:
        say(wrong.error)
        return wrong.status
    report = outcomes[0].report
    assert report is not None
    status = conclude(report, path=settings.report, table=settings.table)
    if settings.timeline is not None:
        write_timeline(settings.timeline, outcomes[0].timelines, told=settings.table)
    if report["interrupted"]:
        raise Interrupted
    return status


def _run_actors(
    cluster: RayCluster, settings: ReplaySettings, ranks_per_node: int | None
) -> list[RankOutcome]:
    """Run one actor for each rank and return their outcomes by rank."""
    store, port = host_store(cluster.host, timeout_s=START_TIMEOUT_S)
    # An exception out of a signal would break Ray's own calls.
    interrupted = note_signals()
    ranks = place_ranks(
        cluster,
        settings.ranks,
        gpus=settings.device == "cuda",
        ranks_per_node=ranks_per_node,
        interrupted=interrupted,
    )
    try:
        ranks.run(settings.to_json(), port)
        with progress_bar(shown=True) as on_done:
            while not ranks.wait() and not interrupted():
                done = ranks.done()
                if done is not None:
                    on_done(done)
        outcomes = ranks.stop()
        if not interrupted():
            return outcomes
        if outcomes[0].report is None:
            raise Interrupted
        return outcomes[:1]
    finally:
        ranks.kill()
        del store
