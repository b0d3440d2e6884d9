"""The groups of a run as actors of a Ray cluster, one for each rank."""

import secrets
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from ...ranks.disaggregation.groups.ray_directory import SCHEME
from ..environment import RankEnvironment
from ..first_error import say
from ..interruption import Interrupted, note_signals, raise_on_signals
from ..meeting import JOIN_TIMEOUT_S, host_store, of_attempt
from ..options import LaunchChoice
from ..ray.actors import RankActor, RankActors, place_groups, worst
from ..ray.cluster import ray_cluster
from ..worker import Watch
from .groups import RESULT_TIMEOUT_S, StartedGroup
from .rank import run_group_rank
from .result import GroupResult, collect, collect_timelines
from .settings import GroupSettings


class GroupRankActor(RankActor):
    """One rank of a group that serves."""

    def _work(self, settings: str, place: RankEnvironment, store: Store, watch: Watch) -> None:
        group = GroupSettings.from_json(settings)
        run_group_rank(group, place, store, watch=watch, host=self._host)


class RayGroup:
    """A group of actors, which are placed already."""

    def __init__(self, settings: GroupSettings, ranks: RankActors, host: str) -> None:
        self.name = settings.name
        self._ranks = ranks
        self._store, port = host_store(host, timeout_s=JOIN_TIMEOUT_S)
        self._status: int | None = None
        self._to_be_ended = threading.Event()
        """Set where the group is killed or ended, so that nobody has to be told that it has ended."""
        ranks.run(settings.to_json(), port)
        # In the main thread Ray would swallow what the handler of a signal raises.
        self._following = threading.Thread(target=self._follow, name="lockstep-group", daemon=True)
        self._following.start()

    def status(self) -> int | None:
        """See `StartedGroup`."""
        return self._status

    def kill(self) -> None:
        """See `StartedGroup`."""
        self._to_be_ended.set()
        self._ranks.kill()

    def result(self) -> GroupResult | None:
        """See `StartedGroup`."""
        return collect(of_attempt(self._store), RESULT_TIMEOUT_S)

    def timelines(self) -> Sequence[bytes]:
        """See `StartedGroup`."""
        return collect_timelines(of_attempt(self._store))

    def end(self) -> None:
        """See `StartedGroup`."""
        self._to_be_ended.set()
        self._following.join()
        self._ranks.kill()

    def _follow(self) -> None:
        while not self._ranks.wait() and not self._to_be_ended.is_set():
            pass
        wrong = worst(self._ranks.stop())
        if wrong is not None and not self._to_be_ended.is_set():
            say(f"group {self.name}: {wrong.error}")
        self._status = 0 if wrong is None else wrong.status


class RayStarter:
    """Starts groups by actors that are placed already."""

    def __init__(self, host: str, placed: dict[str, RankActors]) -> None:
        self.host = host
        self.directory = f"{SCHEME}groups-{secrets.token_hex(8)}"
        self._placed = placed

    def start(self, settings: GroupSettings) -> StartedGroup:
        """See `GroupStarter`."""
        return RayGroup(settings, self._placed[settings.name], self.host)


@contextmanager
def ray_starter(groups: Sequence[GroupSettings], choice: LaunchChoice) -> Generator[RayStarter]:
    """Connect to Ray, reserve room for all groups at once, and yield what starts them there.

    The ranks of a group share a node, and groups are on different ones where there are several. Raises
    `ConfigError` where there is no room.
    """
    raise_on_signals()
    sizes = [each.replay.ranks for each in groups]
    with ray_cluster(choice.ray_address, ranks=sum(sizes)) as cluster:
        # An exception out of a signal would break Ray's own calls.
        interrupted = note_signals()
        placed = place_groups(
            cluster,
            GroupRankActor,
            sizes,
            gpus=False,
            ranks_per_node=choice.ranks_per_node,
            interrupted=interrupted,
        )
        try:
            raise_on_signals()
            if interrupted():
                raise Interrupted
            yield RayStarter(
                cluster.host, {each.name: ranks for each, ranks in zip(groups, placed, strict=True)}
            )
        finally:
            for ranks in placed:
                ranks.kill()
