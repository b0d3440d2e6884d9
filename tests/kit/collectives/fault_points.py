"""Kills or stops a rank at a chosen point of a round, and records the outcome on the other ranks.

A point is a source line of a transport together with an execution count. The fault hits just before a
thread runs the line. The count is 1 for the first execution in a round and 2 for every later one.
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
"""The transports' source files, in which each line can be a fault point."""

ARMED_ROUND = 3
"""Number of the first round with a fault. The earlier rounds show that the group works."""

ROUNDS = 12
"""Number of rounds per run. One round may not reach the fault point, because timing decides which lines
run."""

HEADSTART_S = 0.03
"""Seconds by which the other ranks of the victim's host delay their arrival if the victim must be
first."""


GLOOS_OWN = re.compile(r"socket:|pipe:|eventpoll|lockstep-gloo-owner")
"""Pattern of the names of file descriptors and threads that belong to a gloo group."""


class Point(NamedTuple):
    """A source line of a transport, and one of its executions in a round.

    `time` is 1 for the first execution and 2 for every later one.
    """

    file: str
    line: int
    time: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, time {self.time}"


class Victim(NamedTuple):
    """The rank and thread that a fault hits, and whether that rank arrives first or last at a round."""

    hosts: Literal[1, 2]
    """The number of hosts that the ranks are spread over."""
    rank: int
    thread: Literal["main", "host_leader"]
    arrives: Literal["first", "last"]
    """Whether the victim arrives first or last among the ranks of its host."""


class Fault(NamedTuple):
    """A signal to send to the victim at a fault point. If `point` is None, no signal is sent."""

    victim: Victim
    signal: int
    point: Point | None
    timeout_s: float
    """Timeout in seconds of each round from `ARMED_ROUND` on."""


class Story(NamedTuple):
    """One rank's results: its error, its completed rounds, wrong vectors, and leaked resources."""

    error: str
    text: str
    rounds: int
    """Number of rounds that returned a vector."""
    wrong: list[str]
    waited_s: float
    """Seconds from the start of the first round to the error or the end of the last round."""
    later: list[tuple[str, str]]
    """Errors of three calls that this rank makes after its first error: a round, a gather, and a round
    after `close`."""
    left: list[str]
    """Resources that still exist after the transport was closed."""


class Wire:
    """Records the fault points that a thread passes, and signals the process at one of them."""

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

    def trace_host_leader(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace the host leader's thread; `threading.settrace` installs this function.

        In this thread, a round begins when the transport's function `_carry` is called.
        """
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
    """Snapshot of this process's file descriptors, threads and shared-memory names."""

    def __init__(self) -> None:
        self.files = {each.name: _target(each) for each in Path("/proc/self/fd").iterdir()}
        self.threads = set(threading.enumerate())
        self.named = _names_in_shared_memory()

    def left_over(self) -> list[str]:
        """Return a line for each resource that is new since this snapshot and still exists."""
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
    """Functions with which a rank creates collectives."""

    rank: int
    make: Callable[[], Collective]
    make_another: Callable[[], None]
    """Function that creates and closes a second group, which has one rank. This gives torch an occasion
    to free gloo groups that were closed earlier."""

    @classmethod
    def over_pipes(cls, member: Member) -> Self:
        """Create shared-memory transports between all ranks, without torch."""
        return cls(member.rank, partial(over_shared_memory, over_pipes(member)), lambda: None)

    @classmethod
    def over_gloo(cls, member: Member) -> Self:
        """Create hierarchical transports with two ranks on each host."""
        from lockstep.coordinator.collectives.torch_gloo import TorchCollective

        begin_torch(member)
        names = (f"alone/{member.rank}/{number}" for number in itertools.count())
        # Create and close a group before any snapshot of resources, because torch keeps some resources
        # of its first group forever.
        TorchCollective.create(timeout_s=PATIENCE_S).close()
        return cls(
            member.rank,
            lambda: over_hosts(2, TorchCollective.create(timeout_s=PATIENCE_S)),
            lambda: TorchCollective.among(
                [member.rank], member.rank, next(names), timeout_s=PATIENCE_S
            ).close(),
        )


def points_of_a_round(victim: Victim, opening: Opening, hold: Hold) -> list[Point]:
    """Return the fault points that the victim passes in most rounds, in code order."""
    fault = Fault(victim, 0, None, PATIENCE_S)
    wire = Wire(None, 0)
    collective = _open(fault, wire, opening)
    _run_rounds(fault, wire, collective, [])
    collective.close()
    often = Counter(point for passed in wire.passed[ARMED_ROUND - 1 :] for point in passed)
    return sorted(point for point, times in often.items() if 2 * times > ROUNDS - ARMED_ROUND)


def suffer(fault: Fault, opening: Opening, hold: Hold) -> Story:
    """Run rounds until one fails; return this rank's results.

    If the signal stops the victim but does not kill it, the victim also returns results.
    """
    before = Holdings()
    wire = Wire(fault.point, fault.signal)
    collective = _open(fault, wire, opening)
    wrong: list[str] = []
    kept: list[GroupError] = []
    started = time.monotonic()
    rounds = _run_rounds(fault, wire, collective, wrong, kept)
    waited_s = time.monotonic() - started
    later = [
        _error_of(partial(_one_round, collective)),
        _error_of(partial(_one_gathering, collective)),
    ]
    collective.close()
    later.append(_error_of(partial(_one_round, collective)))
    left = before.left_over()
    if fault.signal == SIGKILL:
        # Check for leaks repeatedly, because the other ranks may still be reading this rank's last
        # message.
        deadline = time.monotonic() + PROMPT_S
        while left and time.monotonic() < deadline:
            opening.make_another()
            left = before.left_over()
    else:
        # Do not count gloo's resources as leaked. If a peer has not answered a gloo group's last
        # exchange, torch keeps the group after its close.
        left = [each for each in left if not GLOOS_OWN.search(each)]
    first = kept[0] if kept else None
    return Story(type(first).__name__, str(first), rounds, wrong, waited_s, later, left)


def _open(fault: Fault, wire: Wire, opening: Opening) -> Collective:
    victim = fault.victim
    if opening.rank == victim.rank and victim.thread == "host_leader":
        threading.settrace(wire.trace_host_leader)
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
    """Run rounds until one fails; return how many rounds completed.

    Appends the error to `kept` (raises it if None), and a line for each wrong vector to `wrong`.
    """
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
    """Delay this rank as needed, so that the victim arrives first or last among its host's ranks."""
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
        # When the victim must be first, each other rank sleeps on its own cell of the host's shared
        # memory. No rank wakes the sleepers, so each sleep lasts until its timeout.
        host.cells.sleep(others[0] if mine else host.me, number, min(left_s, HEADSTART_S))


def lanes_in(number: int, rank: int) -> Vector:
    """Return random lanes that depend on the rank and the round."""
    return np.random.default_rng([number, rank]).integers(-1000, 1000, size=LANES)


def _one_round(collective: Collective) -> None:
    collective.launch(lanes_in(0, collective.rank)).wait(PATIENCE_S)


def _one_gathering(collective: Collective) -> None:
    collective.gather(b"", PATIENCE_S)


def _error_of(call: Callable[[], None]) -> tuple[str, str]:
    try:
        call()
    except GroupError as error:
        return type(error).__name__, str(error)
    return "none", ""
