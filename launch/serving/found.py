"""Serving by groups that somebody else has started: those that a directory lists."""

import time
from collections.abc import Sequence

from ...errors import ConfigError, PeerLost
from ...ranks.agreed_pools import namespace_of
from ...ranks.disaggregation.groups.directory import GroupDirectory, Member
from ...ranks.disaggregation.groups.router import Role
from ...ranks.disaggregation.manifest import HandoffTerms
from ..environment import read_secret
from ..interruption import raise_on_signals
from ..meeting import JOIN_TIMEOUT_S
from .directories import host_towards, open_directory
from .launching import checked, open_lines, serve_by
from .result import GroupResult
from .settings import ServeSettings, Shape

_POLL_S = 0.25


class FoundGroup:
    """A group of which only what it tells is seen."""

    def __init__(self, name: str, results: dict[str, GroupResult]) -> None:
        """`results` gets what groups tell that they have counted."""
        self.name = name
        self._results = results

    def status(self) -> int | None:
        """See `StartedGroup`: it has ended in order once it has told what it has counted."""
        return 0 if self.name in self._results else None

    def kill(self) -> None:
        """See `StartedGroup`; whoever started it can do that."""

    def result(self) -> GroupResult | None:
        """See `StartedGroup`."""
        return self._results.get(self.name)

    def timelines(self) -> Sequence[bytes]:
        """See `StartedGroup`; they are too long to be told."""
        return ()

    def end(self) -> None:
        """See `StartedGroup`; whoever started it can do that."""


def serve_by_found(settings: ServeSettings, where: str, host: str) -> int:
    """Serve the workload by the groups that a directory lists, which end with it; return the status.

    Waits until it lists as many of each role and size as `settings` says. Others reach this process at
    `host`, which is found out where it is empty. Raises as `serve` does, and `ConfigError` for groups
    that serve another model or pages of another layout.
    """
    raise_on_signals()
    requests = checked(settings)
    address = host_towards(where, host)
    directory = open_directory(where)
    try:
        members = _wait_for(directory, where, settings)
        _require_alike(members, settings)
        with open_lines(address, read_secret()) as lines:
            groups = [FoundGroup(each.registration.name, lines.results) for each in members]
            return serve_by(settings, requests, groups, directory, lines)
    finally:
        directory.close()


def _wait_for(directory: GroupDirectory, where: str, settings: ServeSettings) -> list[Member]:
    """Return the groups that are to serve, once there are so many."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    shapes = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
    while True:
        listed = directory.groups().members
        fit = {role: _of_shape(listed, role, shape) for role, shape in shapes.items()}
        if all(len(fit[role]) >= shape.groups for role, shape in shapes.items()):
            return [each for role, shape in shapes.items() for each in fit[role][: shape.groups]]
        if time.monotonic() > deadline:
            there = ", ".join(
                f"{e.registration.name} ({e.registration.role}, {e.registration.tp_size} ranks)"
                for e in listed
            )
            raise PeerLost(
                f"--prefill is {settings.prefill} and --decode {settings.decode}, and the directory"
                f" {where} lists {there or 'no group'}"
            )
        time.sleep(_POLL_S)


def _of_shape(listed: Sequence[Member], role: Role, shape: Shape) -> list[Member]:
    return [
        each
        for each in listed
        if (each.registration.role, each.registration.tp_size) == (role, shape.ranks)
    ]


def _require_alike(members: Sequence[Member], settings: ServeSettings) -> None:
    terms = HandoffTerms.of(namespace_of(settings.replay.cache_config()))
    for each in members:
        if each.registration.fingerprint != terms.layout_fingerprint:
            raise ConfigError(
                f"group {each.registration.name} has pages of another layout; start it with the same"
                " --profile and --page-tokens as this command"
            )
