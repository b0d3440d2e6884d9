"""Runs the command `lockstep` for a test, in the test's process or as a separate process."""

import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from lockstep.launch import lockstep_command

Run = Callable[..., tuple[int, str, str]]
"""Function that runs the command `lockstep` and returns its exit status, stdout and stderr."""

IN_A_PROCESS = (sys.executable, "-c", "from lockstep.launch.lockstep_command import main; main()")
"""Start of a command line that runs `lockstep` in a separate process; the arguments follow."""


def run_lockstep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *first: str
) -> Generator[Run]:
    """Yield a function that runs `lockstep` in this process.

    The command's arguments are `first`, followed by the function's arguments. The signal handlers are
    restored at the end.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lockstep", *first, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            lockstep_command.main()
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    yield run
    for each, disposition in before.items():
        signal.signal(each, disposition)


def refusal(run: Run, *arguments: str | Path) -> str:
    """Run a `lockstep` command that must be refused; return its error line.

    The command must exit with status 2 and print nothing but one line to stderr.
    """
    status, printed, stderr = run(*arguments)
    assert (status, printed, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith("lockstep: ")
    return stderr
