"""Runs the command `lockstep` in the test's process or in a separate one."""

import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from lockstep.launch import lockstep_command

Run = Callable[..., tuple[int, str, str]]
"""Runs the command; returns its exit status, stdout and stderr."""

IN_A_PROCESS = (sys.executable, "-c", "from lockstep.launch.lockstep_command import main; main()")
"""The command in a separate process; its arguments follow."""


def run_lockstep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *first: str
) -> Generator[Run]:
    """Yield a function that runs `lockstep` in this process with the arguments `first` and more.

    Signal handlers are restored afterwards.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lockstep", *first, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            lockstep_command.main()
        said = capfd.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    yield run
    for each, disposition in before.items():
        signal.signal(each, disposition)


def refusal(run: Run, *arguments: str | Path) -> str:
    """Run a command that must be refused: status 2, no output, one line on stderr. Return that line."""
    status, printed, said = run(*arguments)
    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith("lockstep: ")
    return said
