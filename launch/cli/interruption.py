"""Handling of SIGINT and SIGTERM: processes that end at once, and processes that shut down in order.

- A rank that has not opened a store ends at once, by the signal's default action.
- In a rank with an open store, and in a launcher of ranks, the first signal raises `Interrupted`.
- A rank that serves requests finishes its current step first, so that its counters are complete.
- A second signal during the shutdown is ignored, because every step of a shutdown has a time limit.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1

EXIT_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in a shell."""


class Interrupted(BaseException):
    """The user asked this process to end. Not an `Exception`, so that no handler suppresses it."""


_raised: Final[list[int]] = []
"""Number of the signal that raised `Interrupted`, as a list; empty before the signal."""
_other_hooks: Final["list[Callable[[sys.UnraisableHookArgs], object]]"] = []
"""The `sys.unraisablehook` that was installed before `raise_on_signals`."""
_AGAIN_S: Final = 0.001


def was_interrupted() -> bool:
    """Return whether `Interrupted` was raised, even if a library has suppressed the exception."""
    return bool(_raised)


def end_on_signals() -> None:
    """Make SIGINT and SIGTERM end the process at once, without output."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)


def end_with(launcher: int) -> None:
    """Send this process SIGTERM when its parent process `launcher` dies (Linux only).

    A killed launcher cannot end its ranks, and a rank that waits for other ranks would run until its
    timeout. On other systems, each step of a replay checks whether the launcher is alive.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def work_for(launcher: int) -> None:
    """End this process at once after SIGINT, SIGTERM, or the death of its parent `launcher`."""
    end_on_signals()
    end_with(launcher)


def raise_on_signals() -> None:
    """Make the first SIGINT or SIGTERM raise `Interrupted` in the main thread."""
    _raised.clear()
    if sys.unraisablehook is not _raise_again:
        _other_hooks[:] = [sys.unraisablehook]
        sys.unraisablehook = _raise_again
    for each in _SIGNALS:
        signal.signal(each, _raise_once)


def note_signals(*, patience_s: float | None = None) -> Callable[[], bool]:
    """Make SIGINT and SIGTERM only set a flag; return the function that reads the flag.

    Use this around library calls that an exception from a signal handler would break, and for work that
    can stop between two steps. If the flag is not read for `patience_s` seconds after a signal,
    `Interrupted` is raised in the main thread, because the step may be waiting for a rank that has
    left.
    """
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if patience_s is not None and not noted:
            signal.signal(signal.SIGALRM, _raise_once)
            signal.setitimer(signal.ITIMER_REAL, patience_s)
        noted.append(number)

    def read() -> bool:
        if noted:
            _end_patience()
        return bool(noted)

    for each in _SIGNALS:
        signal.signal(each, note)
    return read


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on, because the process is already shutting down."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    _end_patience()


def _end_patience() -> None:
    # Stop only our own timer. If SIGALRM has another handler, other code uses the timer.
    if signal.getsignal(signal.SIGALRM) is _raise_once:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_once(number: int, _frame: FrameType | None) -> None:
    ignore_signals()
    _raised.append(number)
    raise Interrupted


def _raise_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Raise `Interrupted` again if Python ignored it, for example because a destructor raised it."""
    if not issubclass(ignored.exc_type, Interrupted):
        for each in _other_hooks:
            each(ignored)
        return
    # Raise from a timer, because Python also ignores exceptions that `sys.unraisablehook` raises.
    signal.signal(signal.SIGALRM, _raise_once)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
