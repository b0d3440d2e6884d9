"""Exploring schedules from the command line: a report, a summary, and a status."""

import traceback
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, LockstepError
from ..simulation.explore import explore, print_report
from ..simulation.pair import DRAWN, PAIRS
from ..simulation.revived.revived import REVIVED_BUGS, RevivedBug, find_bug
from ..simulation.revived.revived import SEEDS as REVIVED_SEEDS
from ..simulation.world.faults import FAULT_PROFILES
from ..simulation.world.models import MODEL_PROFILES
from ..simulation.world.world import BOTH, L1_CHOICES, STEPS_MIN
from .cli.exits import EXIT_FAULT, say
from .cli.option_values import check_choice, check_number
from .cli.settings import RANKS_MAX, SEED_MAX
from .replay.report import write_report

EXIT_NOT_FOUND = 4
"""A bug was revived, and none of the schedules has found it."""
EXIT_BROKE_DOWN = 70
"""The simulation itself could not go on; nothing is known of what it was to explore."""

RANKS = 2
SEEDS = range(100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """Which schedules to explore."""

    seeds: range
    ranks: int
    pd: str | None
    """The TP sizes of two groups, or `drawn`; None explores one group of `ranks`."""
    steps: int
    profile: str | None
    """The model; None lets each seed draw it."""
    faults: str
    depth: int | None
    """None takes both depths in turn, by the seed."""
    l1: str
    """Who owns the device pages: replica, engine, or both in turn, by the seed."""
    bug: RevivedBug | None = None
    """What is put back, if anything; then only until a schedule finds it."""


def choose_exploration(
    *,
    seeds: str | None,
    ranks: int | None,
    pd: str | None = None,
    steps: int,
    profile: str | None,
    faults: str | None,
    depth: int | None,
    l1: str | None,
    revive: str | None,
) -> Exploration:
    """Return what to explore: as it is told, else as the bug to revive needs it, else as usual."""
    if depth is not None:
        check_number("depth", depth, 0, 1)
    if pd is not None and ranks is not None:
        raise ConfigError("--pd says how many ranks there are; leave out --ranks")
    ranks = RANKS if ranks is None else ranks
    check_number("ranks", ranks, 1, RANKS_MAX)
    check_number("steps", steps, STEPS_MIN)
    bug = None if revive is None else _find_bug(revive)
    usual = SEEDS if bug is None else REVIVED_SEEDS
    exploration = Exploration(
        seeds=usual if seeds is None else parse_seeds(seeds),
        ranks=ranks,
        pd=pd,
        steps=steps,
        profile=profile or (None if bug is None else bug.profile),
        faults=faults or ("mixed" if bug is None else bug.faults),
        depth=depth,
        l1=l1 or (BOTH if bug is None else bug.l1),
        bug=bug,
    )
    _check_choices(exploration)
    return exploration


def _check_choices(exploration: Exploration) -> None:
    if exploration.profile is not None:
        check_choice("profile", exploration.profile, MODEL_PROFILES)
    check_choice("faults", exploration.faults, FAULT_PROFILES)
    check_choice("l1", exploration.l1, L1_CHOICES)
    if exploration.pd is not None:
        check_choice("pd", exploration.pd, (DRAWN, *PAIRS))


def _find_bug(name: str) -> RevivedBug:
    try:
        return find_bug(name)
    except ValueError as error:
        raise ConfigError(f"--revive: {error}") from error


def list_bugs() -> None:
    """Print the bugs that can be revived, each with what it is about."""
    bugs = REVIVED_BUGS.values()
    width = max(len(bug.name) for bug in bugs)
    for bug in bugs:
        print(f"{bug.name:{width}}  {bug.about}")


def parse_seeds(text: str) -> range:
    """Return the seeds that `A:B` stands for: from A up to B - 1."""
    first, separator, last = text.partition(":")
    if not (separator and _is_number(first) and _is_number(last)):
        raise ConfigError(f"--seeds is {text!r}, must be A:B with whole numbers, for example 0:100")
    if int(first) >= int(last):
        raise ConfigError(f"--seeds is {text!r}, must be A:B with A less than B")
    if int(last) > SEED_MAX:
        raise ConfigError(f"--seeds is {text!r}, must be A:B with B at most {SEED_MAX}")
    return range(int(first), int(last))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def run_simulation(exploration: Exploration, report: Path | None) -> int:
    """Explore, print what came out, write the report, and return the status to exit with."""
    bug = exploration.bug
    try:
        found = explore(
            exploration.seeds,
            ranks=exploration.ranks,
            pd=exploration.pd,
            steps=exploration.steps,
            profile=exploration.profile,
            faults=exploration.faults,
            depth=exploration.depth,
            l1=exploration.l1,
            revive=None if bug is None else bug.name,
        )
    except LockstepError:
        raise
    except Exception as error:  # noqa: BLE001 - status 1 says that a schedule has shown a fault.
        traceback.print_exc()
        say(f"the simulation broke down: {type(error).__name__}: {error}")
        return EXIT_BROKE_DOWN
    if report is not None:
        write_report(str(report), found)
    print_report(found)
    if found["violations"]:
        return EXIT_FAULT
    return 0 if bug is None else EXIT_NOT_FOUND
