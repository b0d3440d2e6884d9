"""Signals are noted for a caller that polls; if none polls in time, they raise `Interrupted`."""

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.launch.cli.interruption import (
    Interrupted,
    ignore_signals,
    note_signals,
    raise_on_signals,
)
from tests.kit.launch.in_process import IN_A_PROCESS, Run
from tests.kit.launch.replays import start

SOON_S = 0.01
NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Restore pytest's signal handlers and timer after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {each: signal.getsignal(each) for each in numbers}
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def timer_s() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_a_signal_that_is_asked_for_is_noted_and_never_raised() -> None:
    noted = note_signals(patience_s=NEVER_S)
    assert not noted()

    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)

    assert timer_s() > 0
    assert noted()
    assert timer_s() == 0


def test_a_signal_that_nobody_asks_for_is_raised_when_patience_ends() -> None:
    note_signals(patience_s=SOON_S)

    signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        signal.pause()


def test_a_process_that_is_leaving_already_is_not_interrupted_any_more() -> None:
    note_signals(patience_s=NEVER_S)
    signal.raise_signal(signal.SIGINT)

    ignore_signals()

    assert timer_s() == 0


def test_a_timer_of_somebody_else_is_left_alone() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, NEVER_S)

    ignore_signals()

    assert timer_s() > 0


def test_an_interruption_that_python_ignores_is_raised_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python ignores an interruption raised in a destructor or callback, so it is raised again."""

    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    raise_on_signals()

    def destroy_and_wait() -> None:
        Destroyed()
        signal.sigtimedwait([], 10.0)

    with pytest.raises(Interrupted):
        destroy_and_wait()


def test_a_signal_that_a_library_takes_for_a_failed_import_is_an_interruption(
    lockstep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallow(*_: object) -> None:
        with suppress(Interrupted):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr("lockstep.launch.doctor.doctor_command.examine", swallow)

    assert lockstep("doctor") == (130, "", "lockstep: interrupted\n")


@pytest.mark.parametrize(("ending", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130)])
def test_the_workers_of_a_simulation_end_with_it(
    tmp_path: Path, ending: signal.Signals, status: int
) -> None:
    errors = (tmp_path / "errors").open("w+", encoding="utf-8")
    command = start(errors, *IN_A_PROCESS, "simulate", "--seeds", "0:100000")
    command.wait_until(lambda: len(command.seen) == 2)
    command.process.send_signal(ending)
    ended = command.process.wait(60.0), command.survivors_after(10.0)
    command.kill()

    assert ended == (status, [])
