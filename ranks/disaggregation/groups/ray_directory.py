"""A directory of groups in an actor of a Ray cluster: for all processes that are connected to it.

The actor has an `EmbeddedDirectory`, so every call happens at once for everybody, by the clock of the
actor's node. It ends with the command that opened it first; a directory that is lost with it has no
groups, and nobody comes back to it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Final

from ....errors import ConfigError, StorageError
from .directory import (
    Lease,
    Listing,
    Member,
    Registration,
    from_record,
    require_lease,
    to_record,
)
from .embedded_directory import EmbeddedDirectory

SCHEME: Final = "ray-actor://"
_RAY_NAMESPACE: Final = "lockstep"
_TIMEOUT_S: Final = 5.0
"""How long one answer of the actor may take."""
_START_TIMEOUT_S: Final = 60.0
"""How long the actor may take to be there."""


class DirectoryActor:
    """What the actor does; registrations travel as their records."""

    def __init__(self) -> None:
        self._directory = EmbeddedDirectory()
        self._directory.open()

    def register(self, record: bytes, lease_s: float) -> int:
        """List a group; return its life."""
        registration = from_record(record)
        if registration is None:
            raise ConfigError("a registration that is none")
        return self._directory.register(registration, lease_s).life

    def renew(self, name: str, life: int, lease_s: float) -> bool:
        """Let a lease last longer, if it is not over."""
        return self._directory.renew(Lease(name, life), lease_s)

    def leave(self, name: str, life: int) -> None:
        """Take a group off the list."""
        self._directory.leave(Lease(name, life))

    def groups(self) -> tuple[int, list[tuple[bytes, int]]]:
        """Return the version of the list, and the record and the life of each group."""
        listing = self._directory.groups()
        return listing.version, [(to_record(e.registration), e.life) for e in listing.members]


class RayDirectory:
    """Keeps the contract of `GroupDirectory`."""

    def __init__(self, name: str) -> None:
        """`name` is the actor's; the first who opens it starts it, on its own node."""
        self._text = f"{SCHEME}{name}"
        self._name = name
        self._ray: Any = None
        self._actor: Any = None
        # In the main thread Ray would swallow what the handler of a signal raises.
        self._calls: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Find the actor, or start it. This process must be connected to a cluster."""
        try:
            self._ray = import_module("ray")
        except ImportError as error:
            raise ConfigError(
                f"directory {self._text} needs Ray: pip install 'ray>=2.40'"
            ) from error
        if not self._ray.is_initialized():
            raise ConfigError(
                f"directory {self._text} is reached by Ray, and this process is not connected to it"
            )
        self._calls = ThreadPoolExecutor(1, "lockstep-directory")
        try:
            self._calls.submit(self._find).result(_START_TIMEOUT_S)
        except (self._ray.exceptions.RayError, TimeoutError, ValueError) as error:
            self.close()
            why = (str(error).splitlines() or ["no answer"])[0]
            raise ConfigError(f"directory {self._text} cannot be used: {why}") from error

    def register(self, registration: Registration, lease_s: float) -> Lease:
        """List a group, in the place of one of its name."""
        require_lease(lease_s)
        return Lease(
            registration.name, int(self._ask("register", to_record(registration), lease_s))
        )

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """Let a lease last longer, if it is not over."""
        require_lease(lease_s)
        return bool(self._ask("renew", lease.name, lease.life, lease_s))

    def leave(self, lease: Lease) -> None:
        """Take a group off the list."""
        self._ask("leave", lease.name, lease.life)

    def groups(self) -> Listing:
        """Return who is there."""
        version, rows = self._ask("groups")
        return Listing(int(version), _members(rows))

    def close(self) -> None:
        """Let go of the actor, which goes on."""
        calls, self._calls, self._actor = self._calls, None, None
        if calls is not None:
            calls.shutdown(wait=False, cancel_futures=True)

    def _find(self) -> None:
        here = self._ray.get_runtime_context().get_node_id()
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._actor = (
            self._ray.remote(DirectoryActor)
            .options(
                name=self._name,
                namespace=_RAY_NAMESPACE,
                get_if_exists=True,
                num_cpus=0,
                scheduling_strategy=affinity(here, soft=False),
            )
            .remote()
        )
        self._ray.get(self._actor.groups.remote(), timeout=_START_TIMEOUT_S)

    def _ask(self, what: str, *arguments: object) -> Any:
        actor, calls = self._actor, self._calls
        if calls is None:
            raise StorageError(f"directory {self._text} is not open")

        def call() -> Any:
            return self._ray.get(getattr(actor, what).remote(*arguments), timeout=_TIMEOUT_S)

        try:
            return calls.submit(call).result(2 * _TIMEOUT_S)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            why = (str(error).splitlines() or ["no answer"])[0]
            raise StorageError(f"directory {self._text} does not answer: {why}") from error
        except RuntimeError as error:
            raise StorageError(f"directory {self._text} is not open: {error}") from error


def _members(rows: Sequence[tuple[bytes, int]]) -> tuple[Member, ...]:
    known = ((from_record(record), life) for record, life in rows)
    return tuple(Member(each, int(life)) for each, life in known if each is not None)
