"""The ranks of a replay as actors of a Ray cluster: placed, run, and ended.

Ranks share a node, so that its memory carries their rounds, unless their number on a node is bounded.
What a rank hands over through Ray is what it has come to, and nothing else.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from ...coordinator.codec import Codec
from ...errors import ConfigError, LockstepError
from ..cli.environment import RankEnvironment
from ..cli.exits import EXIT_CONFIG, EXIT_GROUP, exit_code
from ..cli.interruption import Interrupted
from ..cli.meeting import JOIN_TIMEOUT_S, meet
from ..cli.progress import Progress
from ..cli.settings import ReplaySettings
from .ray_cluster import RayCluster
from .report import Report
from .worker import Watch, run_rank

START_TIMEOUT_S = 180.0
"""How long Ray may take to place the actors."""
STOP_TIMEOUT_S = 1.5
"""How long ranks have for an orderly end, and for what they have counted; then they are killed."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """The result of a rank: a report on rank 0, an error, or neither."""

    report: Report | None = None
    timelines: Sequence[bytes] = ()
    """The events of all ranks, on rank 0 of a replay that keeps them."""
    error: str = ""
    status: int = 0
    """What a process ends with after that error."""
    silent: bool = False
    """Whether it has not said anything in time."""


_ENVIRONMENTS: Final[Codec[RankEnvironment]] = Codec(RankEnvironment)
_OUTCOMES: Final[Codec[RankOutcome]] = Codec(RankOutcome)


class ReplayRankActor:
    """One rank. `run` occupies one thread of the actor; the other methods answer beside it."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._done = Progress(0, 0)

    def place(self) -> str:
        """Return the node that the actor was placed on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """Let the rank end at its next step."""
        self._stop.set()

    def done(self) -> Progress:
        """Return how far the rank has come."""
        return self._done

    def run(self, settings: str, environment: bytes) -> bytes:
        """Run the same function as the process of a rank does; return its outcome as msgpack."""

        def note(done: Progress) -> None:
            self._done = done

        try:
            place = _ENVIRONMENTS.decode(environment)
            store = meet(place, timeout_s=JOIN_TIMEOUT_S)
            watch = Watch(on_done=note, stopped=self._stop.is_set)
            done = run_rank(ReplaySettings.from_json(settings), place, store, watch)
            outcome = RankOutcome() if done is None else RankOutcome(**done._asdict())
        except LockstepError as error:
            outcome = RankOutcome(error=str(error), status=exit_code(error))
        except Interrupted:
            outcome = RankOutcome(error="a rank was stopped", status=EXIT_GROUP)
        return _OUTCOMES.encode(outcome)


class RankActors:
    """The actors of all ranks, each of which has a node. End them."""

    def __init__(self, cluster: RayCluster, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._actors = actors
        self._nodes = nodes
        self._runs: list[Any] = []

    def run(self, settings: str, port: int) -> None:
        """Begin: the ranks meet in a store that this process hosts at `port`."""
        for rank, (actor, node) in enumerate(zip(self._actors, self._nodes, strict=True)):
            environment = RankEnvironment(
                rank=rank,
                world_size=len(self._nodes),
                local_rank=self._nodes[:rank].count(node),
                local_world_size=self._nodes.count(node),
                master_addr=self._cluster.host,
                master_port=port,
                store_is_hosted=True,
            )
            self._runs.append(actor.run.remote(settings, _ENVIRONMENTS.encode(environment)))

    def wait(self) -> bool:
        """Wait for a moment; say whether all ranks have ended, or one of them has died or failed."""
        ended, waiting = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=POLL_S)
        return not waiting or any(self._outcome(run, 0).error for run in ended)

    def done(self) -> Progress | None:
        """Return what rank 0 says of its requests, if it does."""
        with suppress(self._ray.exceptions.RayError):
            done = self._ray.get(self._actors[0].done.remote(), timeout=POLL_S * 5)
            return cast("Progress", done)
        return None

    def stop(self) -> list[RankOutcome]:
        """Tell all ranks to end, wait a little, and return what each has come to."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                actor.stop.remote()
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=STOP_TIMEOUT_S)
        return [self._outcome(run, rank) for rank, run in enumerate(self._runs)]

    def kill(self) -> None:
        """Kill all of them at once. Idempotent."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)

    def _outcome(self, run: Any, rank: int) -> RankOutcome:
        try:
            return _OUTCOMES.decode(self._ray.get(run, timeout=POLL_S))
        except self._ray.exceptions.GetTimeoutError:
            said = f"rank {rank} did not end with the others"
            return RankOutcome(error=said, status=EXIT_GROUP, silent=True)
        except self._ray.exceptions.RayError as error:
            why = (str(error).splitlines() or ["no reason given"])[0]
            return RankOutcome(error=f"rank {rank} died: {why}", status=EXIT_GROUP)


def worst(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """Return the outcome that says most about what went wrong; None if nothing did.

    A rank that knows what is wrong with the input says more than one that lost its peers, and each
    says more than what is said here of one that said nothing.
    """
    errors = [each for each in outcomes if each.error]
    return min(errors, key=lambda each: (each.status != EXIT_CONFIG, each.silent), default=None)


def place_ranks(
    cluster: RayCluster,
    ranks: int,
    *,
    gpus: bool,
    ranks_per_node: int | None,
    interrupted: Callable[[], bool],
) -> RankActors:
    """Return an actor for each rank, all of them placed.

    Each takes one CPU, and one GPU where they want `gpus`. Raises `ConfigError` where the cluster has
    no room for them, and `Interrupted` once `interrupted` says so; nothing is left of them then.
    """
    ray = cluster.ray
    most = ranks_per_node or ranks
    bundles = [min(most, ranks - first) for first in range(0, ranks, most)]
    resources = [{"CPU": each} | ({"GPU": each} if gpus else {}) for each in bundles]
    _check_that_nodes_suffice(ray, resources)
    # A bundle never spans nodes, and Ray takes another node for the next one where it can. All of
    # them are reserved at once or not at all, so that two commands never wait for each other.
    reserved = ray.util.placement_group(resources, strategy="SPREAD")
    try:
        actors = [
            _actor(ray, reserved, bundle, gpus=gpus)
            for bundle, ranks_there in enumerate(bundles)
            for _ in range(ranks_there)
        ]
        places = [actor.place.remote() for actor in actors]
        _wait_until_placed(ray, places, interrupted)
        return RankActors(cluster, actors, [str(node) for node in ray.get(places)])
    except BaseException as error:
        with suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(reserved)
        if isinstance(error, ray.exceptions.RayError):
            raise ConfigError(
                f"the cluster cannot run ranks, is Lockstep on every node? {_last_line(error)}"
            ) from error
        raise


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["it says nothing"])[-1]


def _actor(ray: Any, reserved: Any, bundle: int, *, gpus: bool) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=reserved, placement_group_bundle_index=bundle
    )
    options = {"num_cpus": 1, "num_gpus": int(gpus), "max_concurrency": 2, "max_restarts": 0}
    kind = ray.remote(ReplayRankActor)
    return kind.options(scheduling_strategy=strategy, **options).remote()


def _check_that_nodes_suffice(ray: Any, bundles: Sequence[dict[str, int]]) -> None:
    """Raise `ConfigError` where Ray would wait for ever, since it hopes for larger nodes."""
    nodes = [
        node["Resources"] | {"at": node["NodeManagerAddress"]}
        for node in ray.nodes()
        if node["Alive"]
    ]
    for resource in bundles[0]:
        largest = max(nodes, key=lambda node: float(node.get(resource, 0)))
        has = int(largest.get(resource, 0))
        wanted = max(each[resource] for each in bundles)
        if wanted > has:
            raise ConfigError(
                f"{wanted} ranks are to be on one node, each with a {resource} of its own, and the"
                f" largest node of the cluster, {largest['at']}, has {has}; lower --ranks, or say with"
                " --ranks-per-node how many share a node"
            )
        needed = sum(each[resource] for each in bundles)
        in_all = sum(int(node.get(resource, 0)) for node in nodes)
        if needed > in_all:
            raise ConfigError(
                f"there are {needed} ranks, each with a {resource} of its own, and the whole cluster"
                f" has {in_all}"
            )


def _wait_until_placed(ray: Any, placed: list[Any], interrupted: Callable[[], bool]) -> None:
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
                f" {START_TIMEOUT_S:.0f} s; each needs a CPU of its own, and {free} are free"
            )
