"""Ranks as Ray actors, one each, running the same worker function.

Ray starts the ranks, tells them to stop and carries their outcome; pages and rounds never pass
through it. The driver hosts the store in which the ranks meet. Without an address Ray is embedded:
it lives in a temporary directory and ends with the replay.
"""

import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import msgpack
import psutil

from ..errors import ConfigError, LockstepError
from .environment import RankEnvironment, prepare_for_ray
from .first_error import EXIT_CONFIG, EXIT_GROUP, exit_code, say
from .interruption import Interrupted, ignore_signals, note_signals, raise_on_signals
from .meeting import JOIN_TIMEOUT_S, host_store, meet
from .outcome import conclude
from .progress import OnDone, progress_bar
from .report import Report
from .settings import ReplaySettings

START_TIMEOUT_S = 180.0
"""How long Ray may take to place the actors."""
CONNECT_TIMEOUT_S = 5.0
"""How long a cluster may take to accept a connection."""
STOP_TIMEOUT_S = 1.5
"""How long ranks have for an orderly end, and for what they have counted; then they are killed."""
POLL_S = 0.1
OBJECT_STORE_BYTES = 80 << 20
"""Ray's own store, which carries only outcomes; this is about the least that it takes."""


class RankActor:
    """One rank. `run` occupies one thread of the actor; the other methods answer beside it."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._done = (0, 0)

    def node(self) -> str:
        """Return the node that the actor was placed on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """Let the rank end at its next step."""
        self._stop.set()

    def done(self) -> tuple[int, int]:
        """Return how many requests have left the system, and how many there are."""
        return self._done

    def run(self, settings: str, environment: bytes) -> bytes:
        """Replay, and return the outcome as msgpack: the report, an error, or neither."""
        from .worker import Watch, run_rank

        def note(done: int, total: int) -> None:
            self._done = (done, total)

        try:
            place = RankEnvironment(**msgpack.unpackb(environment))
            report = run_rank(
                ReplaySettings.from_json(settings),
                place,
                meet(place, timeout_s=JOIN_TIMEOUT_S),
                Watch(on_done=note, stopped=self._stop.is_set),
            )
            outcome: dict[str, object] = {"report": report}
        except LockstepError as error:
            outcome = {"error": str(error), "status": exit_code(error)}
        except Interrupted:
            outcome = {"error": "a rank was stopped", "status": EXIT_GROUP}
        packed: bytes = msgpack.packb(outcome)
        return packed


def launch_with_ray(settings: ReplaySettings, address: str | None) -> int:
    """Replay on `settings.ranks` actors; return the status to exit with.

    Raises `Interrupted` after SIGINT or SIGTERM, when no rank is left and what was counted is told,
    and `ConfigError` if Ray is not installed, cannot be reached or cannot place the actors.
    """
    raise_on_signals()
    try:
        with _ray(settings.ranks, address) as ray:
            outcomes = _run_actors(ray, settings, embedded=address is None)
    finally:
        ignore_signals()
    errors = [outcome for outcome in outcomes if "error" in outcome]
    if errors:
        # A rank that knows what is wrong with the input says more than one that lost its peers, and
        # each says more than what is said here of one that said nothing.
        worst = min(
            errors, key=lambda outcome: (outcome["status"] != EXIT_CONFIG, "silent" in outcome)
        )
        say(str(worst["error"]))
        return int(cast("int", worst["status"]))
    report = cast("Report", outcomes[0]["report"])
    status = conclude(report, path=settings.report, table=settings.table)
    if report["interrupted"]:
        raise Interrupted
    return status


@contextmanager
def _ray(ranks: int, address: str | None) -> Generator[Any]:
    """Connect to the cluster at `address`, or embed one; leave nothing of it behind."""
    # Ray's sockets live below this directory, and their paths may have 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="lk-", dir="/tmp"))
    try:
        prepare_for_ray(temporary)
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--launcher ray needs Ray: pip install 'ray>=2.40'") from error
        try:
            _connect(ray, ranks, address, temporary)
            yield ray
        finally:
            _shut_down(ray)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _connect(ray: Any, ranks: int, address: str | None, temporary: Path) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temporary),
            **quiet,
        )
        return
    _check_that_somebody_listens(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(f"--ray-address: cannot reach Ray at {address}: {why}") from error


def _check_that_somebody_listens(address: str) -> None:
    """Raise `ConfigError` at once where Ray itself would try again for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"--ray-address is {address!r}, must be HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray-address: cannot reach Ray at {address}: {error}") from error


def _shut_down(ray: Any) -> None:
    """Leave Ray, and end what it has started here even if it was interrupted while starting."""
    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=STOP_TIMEOUT_S)


def _run_actors(ray: Any, settings: ReplaySettings, *, embedded: bool) -> list[dict[str, object]]:
    """Run one actor for each rank and return their outcomes by rank."""
    host = "127.0.0.1" if embedded else str(ray.util.get_node_ip_address())
    store, port = host_store(host, timeout_s=START_TIMEOUT_S)
    remote = ray.remote(RankActor).options(num_cpus=1, max_concurrency=2, max_restarts=0)
    actors = [remote.remote() for _ in range(settings.ranks)]
    runs: list[Any] = []
    # An exception out of a signal would break Ray's own calls.
    interrupted = note_signals()
    try:
        nodes = _wait_until_placed(ray, actors, interrupted)
        for rank, actor in enumerate(actors):
            environment = RankEnvironment(
                rank=rank,
                world_size=settings.ranks,
                local_rank=nodes[:rank].count(nodes[rank]),
                local_world_size=nodes.count(nodes[rank]),
                master_addr=host,
                master_port=port,
                store_is_hosted=True,
            )
            runs.append(actor.run.remote(settings.to_json(), msgpack.packb(asdict(environment))))
        with progress_bar(shown=True) as on_done:
            _wait_for_all(ray, runs, actors[0], on_done, interrupted)
        _let_end(ray, actors, runs)
        outcomes = [_outcome(ray, run, rank) for rank, run in enumerate(runs)]
        if not interrupted():
            return outcomes
        if "report" not in outcomes[0]:
            raise Interrupted
        return outcomes[:1]
    finally:
        with suppress(ray.exceptions.RayError):
            for actor in actors:
                ray.kill(actor)
        del store


def _wait_until_placed(ray: Any, actors: list[Any], interrupted: Callable[[], bool]) -> list[str]:
    """Return the node of each actor, once all of them run."""
    nodes = [actor.node.remote() for actor in actors]
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = nodes
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        if interrupted():
            raise Interrupted
        if waiting and time.monotonic() > deadline:
            placed = len(nodes) - len(waiting)
            raise ConfigError(
                f"Ray placed {placed} of {len(nodes)} ranks within {START_TIMEOUT_S:.0f} s; each "
                "needs one CPU of the cluster"
            )
    return cast("list[str]", ray.get(nodes))


def _wait_for_all(
    ray: Any, runs: list[Any], first: Any, on_done: OnDone, interrupted: Callable[[], bool]
) -> None:
    """Return when every rank has ended, one of them has died or failed, or at an interruption."""
    waiting = runs
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        if interrupted() or any("error" in _outcome(ray, run, 0) for run in ended):
            return
        with suppress(ray.exceptions.RayError):
            on_done(*ray.get(first.done.remote(), timeout=POLL_S * 5))


def _outcome(ray: Any, run: Any, rank: int) -> dict[str, object]:
    try:
        return cast("dict[str, object]", msgpack.unpackb(ray.get(run, timeout=POLL_S)))
    except ray.exceptions.GetTimeoutError:
        said = f"rank {rank} did not end with the others"
        return {"error": said, "status": EXIT_GROUP, "silent": True}
    except ray.exceptions.RayError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        return {"error": f"rank {rank} died: {why}", "status": EXIT_GROUP}


def _let_end(ray: Any, actors: list[Any], runs: list[Any]) -> None:
    """Tell all ranks to end, and wait a little for those that have not."""
    with suppress(ray.exceptions.RayError):
        for actor in actors:
            actor.stop.remote()
        ray.wait(runs, num_returns=len(runs), timeout=STOP_TIMEOUT_S)
