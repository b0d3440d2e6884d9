"""Ranks as processes of this machine, which meet in a store that the launcher serves.

Nothing is restarted: a replay can be run again. A rank says itself, in one line, why it ends; only the
death of a rank that could not speak is explained here.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen, TimeoutExpired

from .environment import RankEnvironment, variables_of
from .first_error import claim, say
from .interruption import ignore_signals, raise_on_signals
from .meeting import host_store, of_attempt
from .replay import SETTINGS_OPTION
from .settings import ReplaySettings
from .worker import JOIN_TIMEOUT_S

SHUTDOWN_TIMEOUT_S = 5.0
"""How long ranks have for an orderly end, once one has failed or after a signal; then they are
killed."""
_POLL_S = 0.05
_HOST = "127.0.0.1"


def launch_with_torch(settings: ReplaySettings) -> int:
    """Replay on `settings.ranks` processes; return the status to exit with.

    Raises `Interrupted` after SIGINT or SIGTERM, when no rank is left.
    """
    raise_on_signals()
    store, port = host_store(_HOST, timeout_s=JOIN_TIMEOUT_S)
    ranks: list[Popen[bytes]] = []
    try:
        for rank in range(settings.ranks):
            # One by one: whatever comes in between, those that were started are ended.
            ranks += [_start(settings, rank, port)]
        status, died = _status(ranks)
        if died is not None:
            # Before the others are ended, so that they leave it to this process to say why.
            claim(of_attempt(store, _place(settings, died, port)))
            number = signal.Signals(-ranks[died].returncode).name
            say(f"rank {died} was killed by {number}; the others were ended")
        return status
    finally:
        ignore_signals()
        _end(ranks)
        del store
        raise_on_signals()


def _place(settings: ReplaySettings, rank: int, port: int) -> RankEnvironment:
    return RankEnvironment(
        rank=rank,
        world_size=settings.ranks,
        local_rank=rank,
        local_world_size=settings.ranks,
        master_addr=_HOST,
        master_port=port,
        store_is_hosted=True,
    )


def _start(settings: ReplaySettings, rank: int, port: int) -> Popen[bytes]:
    place = _place(settings, rank, port)
    launcher = str(os.getpid())
    command = ("-m", "lockstep.launch.replay", SETTINGS_OPTION, settings.to_json(), launcher)
    # A session of its own, so that Ctrl-C reaches the launcher alone.
    return Popen((sys.executable, *command), env=variables_of(place), start_new_session=True)


def _status(ranks: Sequence[Popen[bytes]]) -> tuple[int, int | None]:
    """Wait until all ranks have ended, or one has failed.

    Returns the status to exit with, and the rank that was killed, which could not speak.
    """
    while True:
        codes = [each.poll() for each in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            break
        if None not in codes:
            return 0, None
        time.sleep(_POLL_S)
    # Of those that have failed at once, the one that was killed has made the others fail.
    rank = min(failed, key=lambda each: codes[each] or 0)
    code = ranks[rank].returncode
    return (code, None) if code > 0 else (128 - code, rank)


def _end(ranks: Sequence[Popen[bytes]]) -> None:
    """End the ranks that are left, in order if they can and by force if not."""
    left = [each for each in ranks if each.poll() is None]
    for each in left:
        _signal(each, signal.SIGTERM)
        # One that is stopped takes notice of no other signal before this one.
        _signal(each, signal.SIGCONT)
    until = time.monotonic() + SHUTDOWN_TIMEOUT_S
    for each in left:
        with suppress(TimeoutExpired):
            each.wait(max(0.0, until - time.monotonic()))
    for each in left:
        if each.poll() is None:
            _signal(each, signal.SIGKILL)
            each.wait()


def _signal(rank: Popen[bytes], number: int) -> None:
    """Send a signal to the process of a rank, and to those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, number)
