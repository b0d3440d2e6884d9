"""Close a cache from a signal handler at every instruction of a round over shared memory."""

# These tests use private classes, because they create rank 0 of a group of 2 without rank 1.
# pyright: reportPrivateUsage=false

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from lockstep.coordinator.collectives import shared_memory
from lockstep.coordinator.collectives.futex import Futex
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.coordinator.collectives.shared_memory import Cells, HostGroup, SharedMemoryCollective
from lockstep.errors import CollectiveTimeout, PeerLost

LANES = 40
COLLECTIVES = str(Path("coordinator", "collectives"))


class HandlerError(Exception):
    """Error raised by a signal handler after it has closed the cache."""


@pytest.mark.parametrize("other_has_come", [False, True])
def test_a_round_that_is_closed_anywhere_ends_with_an_error_of_ours_or_with_a_vector(
    other_has_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_LOOKS", 2)

    outcomes = outcomes_of(take_part, other_has_come=other_has_come)

    assert outcomes.keys() <= {PeerLost, CollectiveTimeout, type(None)}, outcomes
    assert outcomes[PeerLost] > 100


@pytest.mark.parametrize("other_has_come", [False, True])
def test_a_question_that_is_closed_anywhere_is_answered(*, other_has_come: bool) -> None:
    assert outcomes_of(ask, other_has_come=other_has_come).keys() == {PeerLost, type(None)}


def test_a_close_that_is_interrupted_by_another_anywhere_closes() -> None:
    assert outcomes_of(take_part_and_close).keys() == {type(None)}


def test_a_handler_that_closes_and_raises_anywhere_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is unmapped even while the handler's error and all its traceback frames are kept."""
    monkeypatch.setattr(shared_memory, "_LOOKS", 2)
    before = mappings()
    kept: list[BaseException] = []

    outcomes = outcomes_of(take_part, HandlerError, kept)

    assert len(kept) == outcomes[HandlerError] > 100
    assert mappings() == before


def take_part(collective: SharedMemoryCollective) -> None:
    collective.launch(np.ones(LANES, dtype=np.int64)).wait(0.0)


def ask(collective: SharedMemoryCollective) -> None:
    collective.launch(np.ones(LANES, dtype=np.int64)).came_back(0.0)


def take_part_and_close(collective: SharedMemoryCollective) -> None:
    with suppress(PeerLost):
        collective.launch(np.ones(LANES, dtype=np.int64))
    collective.close()


def outcomes_of(
    program: Callable[[SharedMemoryCollective], None],
    error: type[Exception] | None = None,
    kept: list[BaseException] | None = None,
    *,
    other_has_come: bool = False,
) -> Counter[type]:
    """Run a program repeatedly: in run n, a handler closes the collective at instruction n.

    Return the count of each error type with which the program ended; the key is `NoneType` if it
    returned. The handler raises `error` if given. Errors raised are appended to `kept`.
    """
    outcomes: Counter[type] = Counter()
    while True:
        collective = first_of_two(other_has_come=other_has_come)
        interrupt = Interrupt(outcomes.total(), collective, error)
        try:
            sys.settrace(interrupt.trace)
            program(collective)
        except (HandlerError, PeerLost, CollectiveTimeout, LookupError, TypeError, ValueError) as e:
            raised: BaseException | None = e
        else:
            raised = None
        finally:
            sys.settrace(None)
            collective.close()
        if interrupt.instructions_left >= 0:
            return outcomes
        outcomes[type(raised)] += 1
        if raised is not None and kept is not None:
            kept.append(raised)


class Interrupt:
    """Traces a program, and closes a collective at a chosen instruction of the transports' code."""

    def __init__(
        self, instruction: int, collective: SharedMemoryCollective, error: type[Exception] | None
    ) -> None:
        self.instructions_left = instruction
        self._collective = collective
        self._error = error

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace function for `sys.settrace`, which traces only frames of the transports' modules."""
        del event, arg
        if COLLECTIVES not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self._trace_instruction

    def _trace_instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        del frame, arg
        if event == "opcode":
            self.instructions_left -= 1
            if self.instructions_left == -1:
                sys.settrace(None)
                self._collective.close()
                if self._error is not None:
                    raise self._error
        return self._trace_instruction


def first_of_two(*, other_has_come: bool) -> SharedMemoryCollective:
    """Return the collective of rank 0 of 2, without a rank 1.

    If `other_has_come`, rank 1's lanes of the first round are already written.
    """
    fd = shared_memory._new_memory(Cells.size(2, LANES))
    cells = Cells(fd, 2, LANES, Futex())
    cells.stamp()
    host = HostGroup(cells, fd, (0, 1), 0)
    group = InProcessGroup(2).member(0)
    if other_has_come:
        cells.write(1, 1, np.arange(LANES, dtype=np.int64))
    return SharedMemoryCollective(group, host)


def mappings() -> int:
    return Path("/proc/self/maps").read_text("ascii").count("lockstep-round")
