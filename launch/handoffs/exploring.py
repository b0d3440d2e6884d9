"""Exploring handoffs from the command line: what to explore, a report, and a status."""

from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ...simulation.handoff.explore import explore_handoffs, print_handoff_report
from ...simulation.handoff.faults import HANDOFF_FAULTS, MIXED
from ...simulation.handoff.world import TP_SIZES
from ...simulation.models import MODEL_PROFILES
from ...simulation.revived.revived import HANDOFF_BUGS, RevivedBug, find_bug
from ...simulation.revived.revived import SEEDS as REVIVED_SEEDS
from ..first_error import EXIT_FAULT
from ..option_values import check_choice, check_number
from ..report import write_report
from ..simulate import EXIT_NOT_FOUND, SEEDS, parse_seeds, print_bugs


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffExploration:
    """Which schedules of two groups to explore."""

    seeds: range
    ranks: tuple[int | None, int | None]
    """The TP sizes of the group that prefills and of the other; None lets each seed draw it."""
    profile: str | None
    faults: str
    depth: int | None
    bug: RevivedBug | None


def choose_exploration(
    *,
    seeds: str | None,
    ranks: tuple[int | None, int | None],
    profile: str | None,
    faults: str | None,
    depth: int | None,
    revive: str | None,
) -> HandoffExploration:
    """Return what to explore: as it is told, else as the bug to revive needs it, else as usual."""
    bug = None if revive is None else _find_bug(revive)
    usual = SEEDS if bug is None else REVIVED_SEEDS
    exploration = HandoffExploration(
        seeds=usual if seeds is None else parse_seeds(seeds),
        ranks=ranks,
        profile=profile or (None if bug is None else bug.profile),
        faults=faults or (MIXED if bug is None else bug.faults),
        depth=depth,
        bug=bug,
    )
    if exploration.profile is not None:
        check_choice("profile", exploration.profile, MODEL_PROFILES)
    check_choice("faults", exploration.faults, HANDOFF_FAULTS)
    if depth is not None:
        check_number("depth", depth, 0, 1)
    for option, size in zip(("prefill-ranks", "decode-ranks"), ranks, strict=True):
        if size not in (None, *TP_SIZES):
            sizes = ", ".join(map(str, TP_SIZES))
            raise ConfigError(f"--{option} is {size}, must be one of {sizes}")
    return exploration


def list_bugs() -> None:
    """Print the bugs that can be revived."""
    print_bugs(HANDOFF_BUGS.values())


def run_exploration(exploration: HandoffExploration, report: Path | None) -> int:
    """Explore, print what came out, write the report, and return the status to exit with."""
    bug = exploration.bug
    found = explore_handoffs(
        exploration.seeds,
        prefill_ranks=exploration.ranks[0],
        decode_ranks=exploration.ranks[1],
        profile=exploration.profile,
        faults=exploration.faults,
        depth=exploration.depth,
        bug=bug,
    )
    if report is not None:
        write_report(str(report), found)
    print_handoff_report(found, bug)
    if found["violations"]:
        return EXIT_FAULT
    return 0 if bug is None else EXIT_NOT_FOUND


def _find_bug(name: str) -> RevivedBug:
    try:
        return find_bug(name, HANDOFF_BUGS)
    except ValueError as error:
        raise ConfigError(f"--revive: {error}") from error
