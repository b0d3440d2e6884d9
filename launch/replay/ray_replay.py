"""Replay on Ray actors, one per rank; an actor runs the same function as a rank's process.

The process of `lockstep replay` hosts torch's rendezvous store. Ray carries only the settings, the
progress and the outcome of each rank.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from ...errors import ConfigError, LockstepError
from ..cli.environment import export_to_ranks, read_rank_environment
from ..cli.exits import EXIT_CONFIG, EXIT_GROUP, exit_code, say
from ..cli.interruption import Interrupted, ignore_signals, note_signals, raise_on_signals
from ..cli.progress import Progress, progress_bar
from ..cli.replay_settings import ReplaySettings
from .options import LaunchChoice
from .outcome import Replayed, conclude
from .ray_cluster import RayCluster, ray_cluster, reserve
from .worker import Watch, run_rank

START_TIMEOUT_S = 180.0
"""Maximum seconds until Ray has placed all actors on nodes."""
STOP_TIMEOUT_S = 1.5
"""Seconds that ranks have to shut down in order and return their counters before they are killed."""
POLL_S = 0.1


class RankOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a rank: a report (rank 0), an error, or neither (other ranks)."""

    replayed: Replayed | None = None
    error: str = ""
    status: int = 0
    """Exit status of the command if it reports this `error`; 0 without an error."""
    silent: bool = False
    """Whether the error is that the rank did not answer in time."""


class ReplayRankActor:
    """Ray actor of one rank: `run` occupies its first thread, and other calls use its second thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._done = Progress(0, 0)

    def node(self) -> str:
        """Return the id of the Ray node on which the actor runs."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """Make the rank stop before its next step."""
        self._stop.set()

    def done(self) -> Progress:
        """Return the rank's progress."""
        return self._done

    def run(self, settings: str, variables: dict[str, str]) -> bytes:
        """Set these environment variables and run the rank; return its outcome, encoded as msgpack."""

        def note(done: Progress) -> None:
            self._done = done

        export_to_ranks(variables)
        try:
            watch = Watch(on_done=note, stopped=self._stop.is_set)
            replayed = run_rank(ReplaySettings.from_json(settings), read_rank_environment(), watch)
            outcome = RankOutcome(replayed=replayed)
        except LockstepError as error:
            outcome = RankOutcome(error=str(error), status=exit_code(error))
        except Interrupted:
            outcome = RankOutcome(error="a rank was stopped", status=EXIT_GROUP)
        return msgspec.msgpack.encode(outcome)


def launch_with_ray(settings: ReplaySettings, choice: LaunchChoice) -> int:
    """Replay on `settings.ranks` actors; return the exit status.

    Raises `Interrupted` after SIGINT or SIGTERM, when all ranks have ended and the counters are
    printed. Raises `ConfigError` if Ray is not installed, cannot be reached or cannot place the actors.
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
    replayed = outcomes[0].replayed
    assert replayed is not None
    status = conclude(replayed, settings)
    if replayed.report["interrupted"]:
        raise Interrupted
    return status


def worst(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """Return the outcome whose error is most informative; None if no rank has failed.

    The order is: configuration errors, then lost peers, then ranks that did not answer.
    """
    errors = [each for each in outcomes if each.error]
    return min(errors, key=lambda each: (each.status != EXIT_CONFIG, each.silent), default=None)


def _run_actors(
    cluster: RayCluster, settings: ReplaySettings, ranks_per_node: int | None
) -> list[RankOutcome]:
    """Run one actor for each rank; return the outcomes in rank order."""
    ray = cluster.ray
    # torch's type stubs lack `TCPStore`, although torch documents it.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
        cluster.host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_TIMEOUT_S),
    )
    # Let signals only set a flag, because an exception from a signal handler would break Ray's calls.
    interrupted = note_signals()
    gpus = settings.device == "cuda"
    reserved = reserve(ray, settings.ranks, ranks_per_node=ranks_per_node, gpus=gpus)
    try:
        actors = _actors(ray, reserved, gpus=gpus)
        meeting = {"MASTER_ADDR": cluster.host, "MASTER_PORT": str(store.port)}
        nodes = _nodes_of(ray, actors, interrupted)
        runs = [
            actor.run.remote(settings.to_json(), _place(nodes, rank) | meeting)
            for rank, actor in enumerate(actors)
        ]
        with progress_bar(shown=True) as on_done:
            while not _have_ended(ray, runs) and not interrupted():
                with suppress(ray.exceptions.RayError):
                    on_done(ray.get(actors[0].done.remote(), timeout=POLL_S * 5))
        with suppress(ray.exceptions.RayError):
            for actor in actors:
                actor.stop.remote()
            ray.wait(runs, num_returns=len(runs), timeout=STOP_TIMEOUT_S)
        outcomes = [_outcome(ray, run, rank) for rank, run in enumerate(runs)]
        if not interrupted():
            return outcomes
        if outcomes[0].replayed is None:
            raise Interrupted
        return outcomes[:1]
    finally:
        # Removing the placement group makes Ray kill the actors that still run in it.
        with suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(reserved)
        del store


def _actors(ray: Any, reserved: Any, *, gpus: bool) -> list[Any]:
    """Create an actor for each rank; Ray places the actors in the bundles later."""
    options = {"num_cpus": 1, "num_gpus": int(gpus), "max_concurrency": 2, "max_restarts": 0}
    kind = ray.remote(**options)(ReplayRankActor)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [
        kind.options(scheduling_strategy=strategy(reserved, bundle)).remote()
        for bundle, resources in enumerate(reserved.bundle_specs)
        for _ in range(int(resources["CPU"]))
    ]


def _nodes_of(ray: Any, actors: Sequence[Any], interrupted: Callable[[], bool]) -> list[str]:
    """Wait until Ray has placed all actors; return the id of each actor's node.

    Raises `ConfigError` if Ray does not place them in time, and `Interrupted` if `interrupted` returns
    true.
    """
    placed = [actor.node.remote() for actor in actors]
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = placed
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        if interrupted():
            raise Interrupted
        if waiting and time.monotonic() > deadline:
            free = int(ray.available_resources().get("CPU", 0))
            raise ConfigError(
                f"Ray placed {len(placed) - len(waiting)} of {len(placed)} ranks within"
                f" {START_TIMEOUT_S:.0f} s; each rank needs a CPU, and {free} are free"
            )
    try:
        return [str(node) for node in ray.get(placed)]
    except ray.exceptions.RayError as error:
        why = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"the cluster cannot run ranks; check that Lockstep is installed on every node: {why}"
        ) from error


def _place(nodes: Sequence[str], rank: int) -> dict[str, str]:
    """Return the environment variables that torch's launchers would set for a rank."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": len(nodes),
        "LOCAL_RANK": nodes[:rank].count(nodes[rank]),
        "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in place.items()}


def _have_ended(ray: Any, runs: Sequence[Any]) -> bool:
    """Wait up to `POLL_S` seconds; return true once all ranks have finished or any has failed."""
    ended, waiting = ray.wait(runs, num_returns=len(runs), timeout=POLL_S)
    return not waiting or any(_outcome(ray, run, 0).error for run in ended)


def _outcome(ray: Any, run: Any, rank: int) -> RankOutcome:
    try:
        return msgspec.msgpack.decode(ray.get(run, timeout=POLL_S), type=RankOutcome)
    except ray.exceptions.GetTimeoutError:
        message = f"rank {rank} did not finish with the others"
        return RankOutcome(error=message, status=EXIT_GROUP, silent=True)
    except ray.exceptions.RayError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        return RankOutcome(error=f"rank {rank} died: {why}", status=EXIT_GROUP)
