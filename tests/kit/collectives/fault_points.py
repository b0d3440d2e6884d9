"""Ranks that are killed or stopped at a chosen point of a round, and what the others make of it.

A point is a line of the transports' own code that a thread is about to run, and how often it has
come to that line in the round: the first time or the second. Later repetitions of a loop are the
second one's like.
"""

import itertools
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGKILL
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from lockstep.coordinator.collective import Collective, Vector
from lockstep.coordinator.collectives import ending, futex, hierarchical, shared_memory
from lockstep.errors import GroupError
from tests.kit.collectives.contract import LANES, PATIENCE_S, PROMPT_S, Hold
from tests.kit.ranks.as_processes import (
    Member,
    begin_torch,
    over_hosts,
    over_pipes,
    over_shared_memory,
)

FILES = {str(each.__file__) for each in (ending, futex, hierarchical, shared_memory)}
"""Whose lines are points."""

ARMED_ROUND = 3
"""The first round with a fault; those before it show that all is well."""

ROUNDS = 12
"""How many rounds a fault has to come about: what a thread passes through depends on the others."""

HEADSTART_S = 0.03
"""How long the others let a rank that shall be the first of its host go on alone."""


GLOOS_OWN = re.compile(r"socket:|pipe:|eventpoll|lockstep-gloo-owner")
"""What lines have that tell of a group of gloo's."""


class Point(NamedTuple):
    """A place of the transports' code, from the second time on for 2."""

    file: str
    line: int
    time: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, time {self.time}"


class Victim(NamedTuple):
    """Which thread of which rank the points are those of, and when it comes to a round."""

    hosts: Literal[1, 2]
    """On which the ranks are."""
    rank: int
    thread: Literal["main", "courier"]
    arrives: Literal["first", "last"]
    """Among the ranks of its host."""


class Fault(NamedTuple):
    """What happens to a rank, and where; without a point, nothing does."""

    victim: Victim
    signal: int
    point: Point | None
    timeout_s: float
    """Of the rounds from the armed one on."""


class Story(NamedTuple):
    """What a rank tells of the rounds that it took part in."""

    error: str
    text: str
    rounds: int
    """How many came back."""
    wrong: list[str]
    waited_s: float
    """How long the last call took."""
    later: list[tuple[str, str]]
    """What a round and a gathering raised after that."""
    left: list[str]
    """What was not given back."""


class Wire:
    """Sends its process a signal when a thread comes to a point; collects the points it passes."""

    def __init__(self, point: Point | None, signal: int) -> None:
        self._point, self._signal = point, signal
        self._times: Counter[tuple[str, int]] = Counter()
        self.armed = False
        self.passed: list[set[Point]] = []

    def begin_round(self) -> None:
        self._times.clear()
        self.passed.append(set())

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def trace_courier(self, frame: FrameType, event: str, arg: Any) -> Any:
        """For `threading.settrace`: each carrying is a round."""
        if frame.f_code.co_name == "_carry":
            self.begin_round()
        return self.trace(frame, event, arg)

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self.armed and self.passed:
            at = (frame.f_code.co_filename, frame.f_lineno)
            self._times[at] += 1
            point = Point(*at, min(self._times[at], 2))
            self.passed[-1].add(point)
            if point == self._point:
                self._point = None
                os.kill(os.getpid(), self._signal)
        return self._line


class Holdings:
    """What this process has of the things that a transport takes."""

    def __init__(self) -> None:
        self.files = {each.name: _target(each) for each in Path("/proc/self/fd").iterdir()}
        self.threads = set(threading.enumerate())
        self.named = _names_in_shared_memory()

    def left_over(self) -> list[str]:
        """Return a line for each thing that has come since and is still there."""
        maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
        left = [each for each in maps if "lockstep-round" in each]
        now = Holdings()
        if len(now.files) > len(self.files):
            left += [
                f"fd {fd}: {target}" for fd, target in now.files.items() if fd not in self.files
            ]
        left += [f"thread {each.name}" for each in now.threads - self.threads if each.is_alive()]
        return left + [f"the name {each}" for each in now.named - self.named]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return "closed meanwhile"


def _names_in_shared_memory() -> set[str]:
    return {each.name for each in Path("/dev/shm").iterdir() if "lockstep-round" in each.name}  # noqa: S108


class Opening(NamedTuple):
    """How a rank makes its transport, as often as it wants."""

    rank: int
    make: Callable[[], Collective]
    make_another: Callable[[], None]
    """Makes a group of this rank alone, for which what was kept of others goes if it can."""

    @classmethod
    def over_pipes(cls, member: Member) -> Self:
        """Shared memory between all ranks, without torch."""
        return cls(member.rank, partial(over_shared_memory, over_pipes(member)), lambda: None)

    @classmethod
    def over_gloo(cls, member: Member) -> Self:
        """Two ranks to a host."""
        from lockstep.coordinator.collectives.torch_gloo import TorchCollective

        begin_torch(member)
        names = (f"alone/{member.rank}/{number}" for number in itertools.count())
        # What torch keeps from the first group on is not the transport's.
        TorchCollective.create(timeout_s=PATIENCE_S).close()
        return cls(
            member.rank,
            lambda: over_hosts(2, TorchCollective.create(timeout_s=PATIENCE_S)),
            lambda: TorchCollective.among(
                [member.rank], member.rank, next(names), timeout_s=PATIENCE_S
            ).close(),
        )


def points_of_a_round(victim: Victim, opening: Opening, hold: Hold) -> list[Point]:
    """Return the points that the victim passes in most rounds, in the order of the code."""
    fault = Fault(victim, 0, None, PATIENCE_S)
    wire = Wire(None, 0)
    collective = _open(fault, wire, opening)
    _run_rounds(fault, wire, collective, [])
    collective.close()
    often = Counter(point for passed in wire.passed[ARMED_ROUND - 1 :] for point in passed)
    return sorted(point for point, times in often.items() if 2 * times > ROUNDS - ARMED_ROUND)


def suffer(fault: Fault, opening: Opening, hold: Hold) -> Story:
    """Run rounds until an error, and tell of it; the victim does if it was only stopped."""
    before = Holdings()
    wire = Wire(fault.point, fault.signal)
    collective = _open(fault, wire, opening)
    wrong: list[str] = []
    kept: list[GroupError] = []
    started = time.monotonic()
    rounds = _run_rounds(fault, wire, collective, wrong, kept)
    waited_s = time.monotonic() - started
    later = [_said(partial(_one_round, collective)), _said(partial(_one_gathering, collective))]
    collective.close()
    later.append(_said(partial(_one_round, collective)))
    left = before.left_over()
    if fault.signal == SIGKILL:
        # The others may be about to take the last news from this one.
        deadline = time.monotonic() + PROMPT_S
        while left and time.monotonic() < deadline:
            opening.make_another()
            left = before.left_over()
    else:
        # A group with an exchange that nobody answers is kept; see `torch_gloo`.
        left = [each for each in left if not GLOOS_OWN.search(each)]
    first = kept[0] if kept else None
    return Story(type(first).__name__, str(first), rounds, wrong, waited_s, later, left)


def _open(fault: Fault, wire: Wire, opening: Opening) -> Collective:
    victim = fault.victim
    if opening.rank == victim.rank and victim.thread == "courier":
        threading.settrace(wire.trace_courier)
    try:
        return opening.make()
    finally:
        threading.settrace(None)


def _run_rounds(
    fault: Fault,
    wire: Wire,
    collective: Collective,
    wrong: list[str],
    kept: list[GroupError] | None = None,
) -> int:
    """Return how many rounds came back. The error that ended them is added to `kept`."""
    mine = collective.rank == fault.victim.rank
    for number in range(1, ROUNDS + 1):
        _arrive(fault.victim, collective, number)
        wire.armed = mine and number >= ARMED_ROUND
        traced = mine and fault.victim.thread == "main"
        if traced:
            wire.begin_round()
            sys.settrace(wire.trace)
        try:
            vector = collective.launch(lanes_in(number, collective.rank)).wait(
                PATIENCE_S if number < ARMED_ROUND else fault.timeout_s
            )
        except GroupError as error:
            sys.settrace(None)
            if kept is None:
                raise
            kept.append(error)
            return number - 1
        finally:
            sys.settrace(None)
        expected = np.minimum.reduce([lanes_in(number, r) for r in range(collective.world_size)])
        if not np.array_equal(vector, expected):
            wrong.append(f"round {number} came back as {vector!r}")
    return ROUNDS


def _arrive(victim: Victim, collective: Any, number: int) -> None:
    """Let the victim be the first or the last of its host to come to a round."""
    host = collective._host
    if victim.rank not in host.ranks or number < ARMED_ROUND:
        return
    mine = collective.rank == victim.rank
    if mine != (victim.arrives == "last"):
        return
    deadline = time.monotonic() + (PATIENCE_S if mine else HEADSTART_S)
    while (left_s := deadline - time.monotonic()) > 0 and not host.ended_before(number):
        others = host.cells.missing(host.here, number)
        others.remove(host.me)
        if mine and not others:
            return
        # Nobody writes the cell of a rank that lets another go first.
        host.cells.sleep(others[0] if mine else host.me, number, min(left_s, HEADSTART_S))


def lanes_in(number: int, rank: int) -> Vector:
    """Return what a rank says in a round: other lanes are the smallest for each rank."""
    return np.random.default_rng([number, rank]).integers(-1000, 1000, size=LANES)


def _one_round(collective: Collective) -> None:
    collective.launch(lanes_in(0, collective.rank)).wait(PATIENCE_S)


def _one_gathering(collective: Collective) -> None:
    collective.gather(b"", PATIENCE_S)


def _said(call: Callable[[], None]) -> tuple[str, str]:
    try:
        call()
    except GroupError as error:
        return type(error).__name__, str(error)
    return "none", ""
