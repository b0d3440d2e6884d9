"""Starting the groups of a run, serving the workload by them, and ending them."""

import random
import secrets
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.console import Console

from ...errors import ConfigError, PeerLost
from ...ranks.agreed_pools import namespace_of
from ...ranks.disaggregation.dispatcher import Terms
from ...ranks.disaggregation.groups.directory import GroupDirectory
from ...ranks.disaggregation.groups.router import Role
from ...ranks.disaggregation.messages.leading_inbox import LeadingInbox
from ...ranks.disaggregation.messages.numbering import InboxBounds
from ...ranks.disaggregation.messages.sender import MessageSender, SenderSettings
from ...ranks.executor.host_memory import available_host_memory
from ...small_engine.workload import count_requests, requests_of, spread_over
from ..interruption import ignore_signals, raise_on_signals
from ..pool_memory import needed_bytes
from ..progress import Progress, progress_bar
from ..report import check_that_writable
from ..reports.timelines import write_timeline
from .directories import open_directory
from .front import Due, Front, Lines
from .groups import GroupStarter, StartedGroup
from .report import conclude, make_serve_report
from .settings import ServeSettings

END_TIMEOUT_S = 120.0
"""How long groups have, once all requests are served, to write what is to be written and to end."""
_POLL_S = 0.05
_REQUESTS_PER_S = 1.0
"""How many come in a second on the mean where a workload has no times."""


def serve(
    settings: ServeSettings, starting: AbstractContextManager[GroupStarter], *, one_host: bool
) -> int:
    """Serve the workload by groups that are started for it; return the status to exit with.

    Raises `Interrupted` after SIGINT or SIGTERM, when no rank is left; `ConfigError` for what cannot
    work, and `PeerLost` where a group does not start, or no group is left that could go on.
    """
    requests = checked(settings)
    if one_host:
        _check_memory(settings)
    secret = "" if one_host else secrets.token_hex(16)
    with (
        starting as starter,
        _directory(settings.directory or starter.directory) as (directory, where),
        open_lines(starter.host, secret) as lines,
        _started(settings, starter, where, secret) as groups,
    ):
        return serve_by(settings, requests, groups, directory, lines)


def checked(settings: ServeSettings) -> int:
    """Return the number of requests. Raises `ConfigError` for what can be known before any group is."""
    replay = settings.replay
    if replay.report is not None:
        check_that_writable(replay.report)
    if replay.timeline is not None:
        check_that_writable(replay.timeline, "timeline")
    requests = count_requests(replay.trace, replay.requests)
    if settings.kill is not None and settings.kill.served >= requests:
        raise ConfigError(
            f"--kill: {settings.kill.served} requests have left only after the run, which has"
            f" {requests}; name a smaller number"
        )
    return requests


def serve_by(
    settings: ServeSettings,
    requests: int,
    groups: Sequence[StartedGroup],
    directory: GroupDirectory,
    lines: Lines,
) -> int:
    """Serve the workload by these groups until they have ended; return the status to exit with.

    Where no group is left that could go on, the report has what was served before, and then
    `PeerLost` is raised.
    """
    replay = settings.replay
    front = Front(
        groups,
        directory,
        _terms(settings),
        lines,
        concurrency=replay.concurrency,
        outputs_max=replay.output_tokens_max,
        lease_s=settings.lease_s,
        patience_s=settings.patience_s,
    )
    front.wait_for_groups()
    began_s = time.monotonic()
    with progress_bar(shown=True) as on_done:
        kill = _killing(settings, groups)

        def left(number: int) -> None:
            on_done(Progress(number, requests))
            kill(number)

        lost: PeerLost | None = None
        try:
            front.serve(_coming(settings), left)
        except PeerLost as error:
            lost = error
    wall_s = time.monotonic() - began_s
    faults: list[str] = []
    # One whose lease was over and that came back is there, too.
    left_over = {each.name: each for each in groups}
    # Those that compute are read from until those that decode have ended.
    for role in (Role.DECODE, Role.PREFILL):
        names = front.drain(role)
        faults += _wait_for_ends(front, [left_over[name] for name in names if name in left_over])
    ended = [each for each in groups if each.status() == 0]
    results = {each.name: each.result() for each in ended}
    known = {name: each for name, each in results.items() if each is not None}
    report = make_serve_report(settings, front.counts, known, wall_s)
    console = Console(highlight=False, emoji=False) if replay.table else None
    status = conclude(report, faults, path=replay.report, console=console, went_on=lost is None)
    if replay.timeline is not None:
        timelines = {each.name: each.timelines() for each in ended}
        write_timeline(replay.timeline, timelines, told=replay.table)
    if lost is not None:
        raise lost
    return status


@contextmanager
def _directory(named: str) -> Generator[tuple[GroupDirectory, str]]:
    """Open the directory, one of this run's own unless another is named; yield where it is, too."""
    with tempfile.TemporaryDirectory(prefix="lockstep-groups-") as place:
        where = named or str(Path(place) / "groups.db")
        directory = open_directory(where)
        try:
            yield directory, where
        finally:
            directory.close()


@contextmanager
def open_lines(host: str, secret: str) -> Generator[Lines]:
    """Take messages at `host`, and be able to send them; who has no part in `secret` cannot."""
    key = secret.encode()
    inbox = LeadingInbox(
        f"{host}:0",
        secret=key,
        bounds=InboxBounds(),
        life=secrets.token_bytes(16),
        world_size=1,
    )
    sender = MessageSender(SenderSettings(secret=key, messages_waiting=4096))
    try:
        yield Lines(inbox, sender)
    finally:
        sender.close()
        inbox.close()


@contextmanager
def _started(
    settings: ServeSettings, starter: GroupStarter, where: str, secret: str
) -> Generator[list[StartedGroup]]:
    raise_on_signals()
    groups: list[StartedGroup] = []
    try:
        for each in settings.groups(where, secret):
            groups += [starter.start(each)]
        yield groups
    finally:
        ignore_signals()
        # Those that decode first, so that nobody is left who reads from a group that has ended.
        for group in reversed(groups):
            group.end()
        raise_on_signals()


def _terms(settings: ServeSettings) -> Terms:
    config = settings.replay.cache_config()
    replay = settings.replay
    return Terms(
        model_digest=bytes.fromhex(namespace_of(config).digest()),
        page_tokens=replay.page_tokens,
        tokens_max=(replay.device_pages + replay.host_pages) * replay.page_tokens,
    )


def _coming(settings: ServeSettings) -> Iterator[Due]:
    """Yield the requests with when they come: the trace's times, or drawn ones where it has none."""
    replay = settings.replay
    draw = random.Random(replay.seed)  # noqa: S311 - a workload must repeat.
    at_s, first_ms = 0.0, None
    requests = requests_of(replay.trace, replay.seed, replay.requests)
    for request in spread_over(replay.namespaces, requests):
        if request.arrived_ms is None:
            at_s += draw.expovariate(_REQUESTS_PER_S)
        else:
            first_ms = request.arrived_ms if first_ms is None else first_ms
            at_s = max(at_s, (request.arrived_ms - first_ms) / 1000)
        yield Due(at_s / settings.speed, request)


def _killing(settings: ServeSettings, groups: Sequence[StartedGroup]) -> Callable[[int], None]:
    """Return what kills the group that is to be killed, once so many requests have left."""
    left = [settings.kill] if settings.kill is not None else []

    def kill(number: int) -> None:
        while left and number >= left[0].served:
            wanted = left.pop()
            for each in groups:
                if each.name == wanted.group:
                    each.kill()

    return kill


def _wait_for_ends(front: Front, groups: Sequence[StartedGroup]) -> list[str]:
    """Wait until all groups have ended; return what was wrong with how."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(each.status() is None for each in groups) and time.monotonic() < deadline:
        front.listen()
        time.sleep(_POLL_S)
    return [
        f"group {each.name} did not end in order: "
        + ("it still runs" if each.status() is None else f"status {each.status()}")
        for each in groups
        if each.status() != 0
    ]


def _check_memory(settings: ServeSettings) -> None:
    """Raise `ConfigError` if the pools of all groups do not fit this machine."""
    needed = sum(needed_bytes(each.replay) * each.replay.ranks for each in settings.groups())
    available, where = available_host_memory()
    if needed > available:
        raise ConfigError(
            f"the pools of all groups need {needed / 2**30:.2f} GiB, and {available / 2**30:.2f} GiB is"
            f" available {where}; lower --device-pages or --host-pages"
        )
