"""Ctrl-C and SIGTERM: when they end a process at once, and when it must leave in order.

A rank that has opened nothing ends by the signal itself. A rank that has a store open, or a process
that has started ranks, gets `Interrupted` once; a rank that serves requests ends after the step that it
is in, so that what it has counted holds. A second signal during its orderly end is ignored, because
everything in it is bounded.
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
"""What a shell says of a command that Ctrl-C has ended."""


class Interrupted(BaseException):
    """Somebody asked this process to end. Not an `Exception`: nothing recovers from it."""


_raised: Final[list[int]] = []
"""The signal that has raised `Interrupted`, once one has."""
_other_hooks: Final["list[Callable[[sys.UnraisableHookArgs], object]]"] = []
"""The `sys.unraisablehook` that `raise_on_signals` has replaced."""
_AGAIN_S: Final = 0.001


def was_interrupted() -> bool:
    """Say whether `Interrupted` was raised. A library that is being imported may have caught it."""
    return bool(_raised)


def end_on_signals() -> None:
    """From now on SIGINT and SIGTERM end the process at once and in silence."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)


def end_with(launcher: int) -> None:
    """From now on the death of the parent process `launcher` is a SIGTERM to this one.

    A launcher that is killed cannot end its ranks, and a rank that still waits for the others would
    only notice when that wait is over. Linux; elsewhere the launcher's death is seen at each step.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def work_for(launcher: int) -> None:
    """From now on this process ends at once by a signal, and with the parent process `launcher`."""
    end_on_signals()
    end_with(launcher)


def raise_on_signals() -> None:
    """From now on the first SIGINT or SIGTERM raises `Interrupted` in the main thread."""
    _raised.clear()
    if sys.unraisablehook is not _raise_again:
        _other_hooks[:] = [sys.unraisablehook]
        sys.unraisablehook = _raise_again
    for each in _SIGNALS:
        signal.signal(each, _raise_once)


def note_signals(*, patience_s: float | None = None) -> Callable[[], bool]:
    """From now on SIGINT and SIGTERM only set a flag; return the function that reads it.

    For calls into libraries that an exception out of a signal would break, and for work that can end
    between two steps. With `patience_s` a flag that nobody reads for so long raises `Interrupted` in
    the main thread: the step may be one that waits for a rank that has left.
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
    """From now on SIGINT and SIGTERM do nothing: the process is leaving already."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    _end_patience()


def _end_patience() -> None:
    # A timer with another handler is somebody else's.
    if signal.getsignal(signal.SIGALRM) is _raise_once:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_once(number: int, _frame: FrameType | None) -> None:
    ignore_signals()
    _raised.append(number)
    raise Interrupted


def _raise_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Raise `Interrupted` once more if Python has ignored it, as in a destructor or while it forks."""
    if not issubclass(ignored.exc_type, Interrupted):
        for each in _other_hooks:
            each(ignored)
        return
    # Soon, since what a hook raises is ignored as well.
    signal.signal(signal.SIGALRM, _raise_once)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
