"""A rank that is killed or stopped anywhere in a round: the others end alike, and nothing is left.

The points are the lines of the transports' code, as a dry run passes them. What is inherent, since
no protocol can let the last message be known to have arrived:

- **Between hosts, one round.** A courier that dies or stops after the exchange and before it has
  written the result leaves its own host without a round that the other hosts have. Those end in the
  round after it. They have applied one verdict more, in an epoch that is over on every rank.
- **Between hosts, the words.** Only a courier could tell the other hosts which rank was lost. If it is
  the courier's, they say that a rank of another host was.
- **At the deadline.** A rank that comes in the moment in which another gives up on it may find the
  round complete, and learns in the next that it was late in this one.
"""

import os
import random
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from tests.kit.collectives.contract import PATIENCE_S, PROMPT_S, SHORT_S
from tests.kit.collectives.fault_points import (
    ROUNDS,
    Fault,
    Opening,
    Point,
    Story,
    Victim,
    points_of_a_round,
    suffer,
)
from tests.kit.ranks.as_processes import Member, RanksAsProcesses

pytestmark = pytest.mark.distributed

SEED = 7
"""Draws the points of the fast tests."""

TRIES = 3
"""How many groups a victim has to come to a point, which depends on what the others do meanwhile."""

NEVER_CAME = ["the victim did not come there in any round"]

AT_ONCE = 4
"""How many groups with a stopped rank run side by side: they mostly wait for a deadline."""

ON_ONE_HOST = [Victim(1, rank, "main", arrives) for rank in (0, 2) for arrives in ("first", "last")]
"""The rank that made the memory, and one that did not."""

ON_TWO_HOSTS = [
    Victim(2, 0, "main", "first"),
    Victim(2, 0, "main", "last"),
    Victim(2, 0, "courier", "last"),
    Victim(2, 3, "main", "first"),
    Victim(2, 3, "main", "last"),
]
"""A host's first rank, which speaks for it, and one that does not."""


def named(victim: Victim) -> str:
    return f"{victim.hosts} hosts, {victim.thread} of rank {victim.rank}, {victim.arrives}"


class Trial:
    """Lets one victim suffer at points of its rounds, on ranks of a kind."""

    def __init__(self, folder: Path, join: Callable[[Member], Opening], victim: Victim) -> None:
        self._ranks = RanksAsProcesses(folder, join=join)
        self._victim = victim

    def points(self) -> list[Point]:
        told: list[list[Point]] = self._ranks.run(partial(points_of_a_round, self._victim), 4)
        return told[self._victim.rank]

    def kill_at(self, point: Point) -> list[str]:
        """Return what was wrong with the survivors of a rank that was killed at the point."""
        fault = Fault(self._victim, signal.SIGKILL, point, PATIENCE_S)
        return self._complaints(fault, "PeerLost")

    def stop_at(self, point: Point) -> list[str]:
        """Return what was wrong with the others while a rank was stopped at the point."""
        fault = Fault(self._victim, signal.SIGSTOP, point, SHORT_S)
        return self._complaints(fault, "CollectiveTimeout")

    def _complaints(self, fault: Fault, error: str) -> list[str]:
        for _ in range(TRIES):
            stories = self._survivors(fault)
            if any(story.rounds < ROUNDS for story in stories.values()):
                return complaints(stories, fault.victim, error)
        return NEVER_CAME

    def _survivors(self, fault: Fault) -> dict[int, Story]:
        victim = self._victim.rank
        with self._ranks.start(partial(suffer, fault), 4) as group:
            stories = {rank: group.result(rank) for rank in range(4) if rank != victim}
            if fault.signal == signal.SIGSTOP:
                os.kill(group.processes[victim].pid, signal.SIGCONT)
                stories[victim] = group.result(victim)
            return stories


def complaints(stories: dict[int, Story], victim: Victim, error: str) -> list[str]:
    """Return a line for each claim that does not hold of what the ranks tell."""
    wrong: list[str] = []
    for rank, story in stories.items():
        if story.error != error:
            wrong.append(f"rank {rank} raised {story.error}: {story.text}")
        if story.waited_s > PROMPT_S:
            wrong.append(f"rank {rank} waited {story.waited_s:.1f} s")
        if story.later != [(story.error, story.text)] * len(story.later):
            wrong.append(f"rank {rank} raised {story.text!r}, and later {story.later}")
        wrong += [f"rank {rank}: {each}" for each in story.wrong]
        wrong += [f"rank {rank} left {each}" for each in story.left]
    return wrong + disagreements(stories, victim)


def disagreements(stories: dict[int, Story], victim: Victim) -> list[str]:
    """Return how the survivors differ, if they do by more than is inherent."""
    survivors = {rank: story for rank, story in stories.items() if rank != victim.rank}
    if victim.hosts == 2 and victim.rank == 0:
        hosts = [[survivors[1]], [survivors[2], survivors[3]]]
    else:
        hosts = [list(survivors.values())]
    wrong = [
        f"ranks of a host tell {[(each.text, each.rounds) for each in host]}"
        for host in hosts
        if len({(each.text, each.rounds) for each in host}) > 1
    ]
    rounds = [host[0].rounds for host in hosts]
    if max(rounds) - min(rounds) > 1:
        wrong.append(f"hosts had {rounds} rounds")
    return wrong


def found_at(
    points: Sequence[Point], call: Callable[[Point], list[str]], at_once: int
) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(call, points))
    return [
        f"{point}: {each}" for point, wrong in zip(points, found, strict=True) for each in wrong
    ]


def first_found(
    points: Sequence[Point], call: Callable[[Point], list[str]], count: int
) -> list[str]:
    """Call for points in turn until the victim has come to so many: some it passes by chance alone."""
    told = ((point, call(point)) for point in points)
    reached = list(islice(((point, wrong) for point, wrong in told if wrong != NEVER_CAME), count))
    lacking = [f"only {len(reached)} points were come to"] * (len(reached) < count)
    return [f"{point}: {each}" for point, wrong in reached for each in wrong] + lacking


def trial_on(folder: Path, victim: Victim) -> Trial:
    join = Opening.over_pipes if victim.hosts == 1 else Opening.over_gloo
    return Trial(folder, join, victim)


victims = pytest.mark.parametrize("victim", ON_ONE_HOST + ON_TWO_HOSTS, ids=named)
some_victims = pytest.mark.parametrize(
    "victim", [ON_ONE_HOST[0], ON_ONE_HOST[3], ON_TWO_HOSTS[2], ON_TWO_HOSTS[3]], ids=named
)


@some_victims
def test_a_rank_killed_or_stopped_in_a_round_ends_all_others_alike(
    victim: Victim, tmp_path: Path
) -> None:
    """Rules R10 and R13, at a few points that a seed draws."""
    trial = trial_on(tmp_path, victim)
    points = trial.points()
    drawn = random.Random(SEED).sample(points, len(points))

    wrong = first_found(drawn, trial.kill_at, 3) + first_found(drawn[::-1], trial.stop_at, 1)

    assert not wrong, f"seed {SEED}: " + "\n".join(wrong)


@pytest.mark.slow
@victims
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
def test_a_rank_killed_or_stopped_anywhere_in_a_round_ends_all_others_alike(
    stops: bool, victim: Victim, tmp_path: Path
) -> None:
    """Rules R10 and R13: whoever learns of it how, all tell the same; nobody waits in vain.

    Also if a rank that was stopped goes on later, in the middle of what it was about to do.
    """
    trial = trial_on(tmp_path, victim)

    wrong = found_at(
        trial.points(), trial.stop_at if stops else trial.kill_at, AT_ONCE if stops else 1
    )

    assert not wrong, "\n".join(wrong)
