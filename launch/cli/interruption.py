"""Handling of SIGINT and SIGTERM: processes that end at once, and processes that shut down in order.

- A rank that has opened nothing is ended by the signal itself.
- A rank with an open store, and a process that started ranks, gets `Interrupted` once.
- A rank that serves requests stops after its current step, so that its counters are complete.
- A second signal during the shutdown is ignored, because every step of a shutdown is bounded.
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
"""A shell's exit status for a command that Ctrl-C ended."""


class Interrupted(BaseException):
    """This process was asked to end. Not an `Exception`, so that no handler recovers from it."""


_raised: Final[list[int]] = []
"""The signal that raised `Interrupted`; empty until then."""
_other_hooks: Final["list[Callable[[sys.UnraisableHookArgs], object]]"] = []
"""The `sys.unraisablehook` that `raise_on_signals` replaced."""
_AGAIN_S: Final = 0.001


def was_interrupted() -> bool:
    """Return whether `Interrupted` was raised, even if a library's import caught the exception."""
    return bool(_raised)


def end_on_signals() -> None:
    """Make SIGINT and SIGTERM end the process at once, without output."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)


def end_with(launcher: int) -> None:
    """Send this process SIGTERM when its parent process `launcher` dies (Linux only).

    A launcher that is killed cannot end its ranks, and a rank that waits for the others would notice
    only at its timeout. On other systems each step checks whether the launcher is alive.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def work_for(launcher: int) -> None:
    """Make signals end this process at once, and end it when its parent process `launcher` dies."""
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
    can stop between two steps. If the flag is not read within `patience_s`, `Interrupted` is raised in
    the main thread, because the current step may be waiting for a rank that has left.
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
    # A timer with another handler belongs to other code.
    if signal.getsignal(signal.SIGALRM) is _raise_once:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_once(number: int, _frame: FrameType | None) -> None:
    ignore_signals()
    _raised.append(number)
    raise Interrupted


def _raise_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Raise `Interrupted` again if Python ignored it, for example in a destructor or during a fork."""
    if not issubclass(ignored.exc_type, Interrupted):
        for each in _other_hooks:
            each(ignored)
        return
    # Use a timer, because Python ignores exceptions that this hook raises.
    signal.signal(signal.SIGALRM, _raise_once)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
