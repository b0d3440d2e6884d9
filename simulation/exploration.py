"""Options of `lockstep simulate`: which schedules to explore.

The options are separate from the simulator, so that `--help` is printed without importing it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from cyclopts import Parameter
from cyclopts.validators import Number

from ..errors import ConfigError
from ..ranks.protocol.config import RANKS_MAX
from .world.faults import FAULT_PROFILES
from .world.models import MODEL_PROFILES
from .world.world import DRAWN, L1_CHOICES, PAIRS, STEPS_MIN

LIST: Final = "list"
"""The value of `--revive` that prints a list of all bugs."""
SEEDS: Final = range(100)
REVIVED_SEEDS: Final = range(2_000)
"""Seeds that `--revive` tries by default; enough that every revived bug shows in at least one of them.
"""


def _seeds(_kind: object, tokens: Sequence[Any]) -> range:
    """Return the seeds that an argument of the form A:B names: from A up to B - 1."""
    text = str(tokens[0].value)
    first, separator, last = text.partition(":")
    if not (separator and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"{text!r} must be A:B with whole numbers, for example 0:100")
    if not int(first) < int(last) <= sys.maxsize:
        raise ValueError(f"{text!r} must be A:B with A less than B, and B at most {sys.maxsize}")
    return range(int(first), int(last))


def _check_bug(_kind: object, name: str | None) -> None:
    if name is not None and name != LIST:
        from .revived.revived import find_bug  # noqa: PLC0415

        try:
            find_bug(name)
        except ValueError as error:
            raise ConfigError(f"--revive: {error}") from error


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """The schedules to explore: options of `lockstep simulate`."""

    seeds: Annotated[
        range | None,
        Parameter(
            converter=_seeds,
            n_tokens=1,
            metavar="A:B",
            show_default=f"0:{SEEDS.stop}; 0:{REVIVED_SEEDS.stop} with --revive",
        ),
    ] = None
    """Seeds to explore, A:B: from A up to B - 1."""
    ranks: Annotated[
        int | None,
        Parameter(validator=Number(gte=1, lte=RANKS_MAX), show_default="2"),
    ] = None
    """Number of simulated ranks."""
    pd: Annotated[
        str | None,
        Parameter(
            choices=(DRAWN, *PAIRS), show_choices=False, metavar="PxD", show_default="one group"
        ),
    ] = None
    """Simulate a producer group that hands requests over to a consumer group. PxD are their TP sizes,
    each 1, 2, 4 or 8, as in 2x1; `drawn` lets the seed choose."""
    steps: Annotated[int, Parameter(validator=Number(gte=STEPS_MIN))] = STEPS_MIN
    """Number of steps of each schedule."""
    profile: Annotated[
        str | None,
        Parameter(choices=MODEL_PROFILES, show_default="drawn by the seed, or what --revive needs"),
    ] = None
    """Model profile, which names the components besides full attention."""
    faults: Annotated[
        str | None,
        Parameter(choices=FAULT_PROFILES, show_default="mixed, or what --revive needs"),
    ] = None
    """Profile of faults and memory pressure."""
    depth: Annotated[
        int | None, Parameter(validator=Number(gte=0, lte=1), show_default="both in turn")
    ] = None
    """Pipeline depth, 0 or 1."""
    l1: Annotated[
        str | None, Parameter(choices=L1_CHOICES, show_default="both, or what --revive needs")
    ] = None
    """Owner of the device pages: replica, engine, or both (the seed decides)."""
    revive: Annotated[
        str | None, Parameter(metavar="BUG", show_default="none", validator=_check_bug)
    ] = None
    """Reintroduce a known bug, and stop at the first schedule that finds it: A to E, or a name from
    `--revive list`. The exit status is 1 if the bug is found, and 4 if not."""

    def __post_init__(self) -> None:
        if self.pd is not None and self.ranks is not None:
            raise ConfigError("--pd sets the number of ranks; remove --ranks")

    def with_what_its_bug_needs(self) -> "Exploration":
        """Return a copy whose unset seeds, model, faults and L1 owner suit the bug in `revive`."""
        if self.revive is None:
            return self
        from .revived.revived import find_bug  # noqa: PLC0415

        bug = find_bug(self.revive)
        return replace(
            self,
            seeds=self.seeds or REVIVED_SEEDS,
            profile=self.profile or bug.profile,
            faults=self.faults or bug.faults,
            l1=self.l1 or bug.l1,
            revive=bug.name,
        )
