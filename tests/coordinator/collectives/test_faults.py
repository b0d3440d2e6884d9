"""Kill or stop a rank at any line of a round: all others raise the same error and leak nothing.

A dry run records the lines of the transports' code that a victim can be stopped at. Three differences
between survivors are inherent, because no protocol can confirm that its last message arrived:

- **Between hosts, one round.** If a host-leader thread dies or stops after the exchange and
  before it writes the result, its host misses a round that the other hosts have. The other hosts
  apply that round's verdict and end one round later. The epoch is over on every rank.
- **Between hosts, the text.** Only a host leader can report to the other hosts which rank was lost.
  If the host leader's own rank was lost, the other hosts report only that a rank of another host was
  lost.
- **At the deadline.** A rank that arrives just when another rank stops waiting for it may find the
  round complete. The late rank gets the error in the next round.
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

TRIES = 3
"""Number of attempts to stop a victim at one point. Other ranks' timing decides whether the victim
reaches the point."""

NEVER_CAME = ["the victim did not come there in any round"]

AT_ONCE = 4
"""Number of groups with a stopped rank that run at the same time. Such groups mostly wait for a
deadline, so they use little processor time."""

ON_ONE_HOST = [Victim(1, rank, "main", arrives) for rank in (0, 2) for arrives in ("first", "last")]
"""Ranks to kill: the one that created the shared memory, and one that did not."""

ON_TWO_HOSTS = [
    Victim(2, 0, "main", "first"),
    Victim(2, 0, "main", "last"),
    Victim(2, 0, "host_leader", "last"),
    Victim(2, 3, "main", "first"),
    Victim(2, 3, "main", "last"),
]
"""Ranks to kill: a host's first rank, which is its leader, and one that is not."""


def named(victim: Victim) -> str:
    return f"{victim.hosts} hosts, {victim.thread} of rank {victim.rank}, {victim.arrives}"


class Trial:
    """Runs groups of ranks, and kills or stops one victim rank at a given point of a round."""

    def __init__(self, folder: Path, join: Callable[[Member], Opening], victim: Victim) -> None:
        self._ranks = RanksAsProcesses(folder, join=join)
        self._victim = victim

    def points(self) -> list[Point]:
        points_by_rank: list[list[Point]] = self._ranks.run(
            partial(points_of_a_round, self._victim), 4
        )
        return points_by_rank[self._victim.rank]

    def kill_at(self, point: Point) -> list[str]:
        fault = Fault(self._victim, signal.SIGKILL, point, PATIENCE_S)
        return self._complaints(fault, "PeerLost")

    def stop_at(self, point: Point) -> list[str]:
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
    """Return the differences between survivors' reports that are not inherent."""
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
    """Try points until the victim has reached `count` of them; return a line for each error found.

    The victim reaches some points only by chance.
    """
    results = ((point, call(point)) for point in points)
    reached = list(
        islice(((point, wrong) for point, wrong in results if wrong != NEVER_CAME), count)
    )
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
    """Rules R10 and R13: kill or stop the victim at a few points, drawn at random from a fixed seed."""
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
    """Rules R10 and R13: all survivors report the same error, and no rank waits past its deadline.

    A rank stopped by SIGSTOP is resumed later; its call must then report the same error.
    """
    trial = trial_on(tmp_path, victim)

    wrong = found_at(
        trial.points(), trial.stop_at if stops else trial.kill_at, AT_ONCE if stops else 1
    )

    assert not wrong, "\n".join(wrong)
