"""`lockstep simulate`: explore schedules, print a summary, write a report, return an exit status."""

import os
import traceback
from functools import partial
from typing import Final

from ..errors import LockstepError
from ..simulation.exploration import LIST, Exploration
from .cli.exits import EXIT_FAULT, say
from .cli.interruption import work_for
from .cli.options import ReportFile
from .cli.report_files import write_report

EXIT_NOT_FOUND = 4
"""Exit status if no schedule found the bug that `--revive` put back."""
EXIT_BROKE_DOWN = 70
"""Exit status if the simulator itself failed, so that the schedules were not checked."""
_USUAL: Final = Exploration()


def simulate(*, exploration: Exploration = _USUAL, report: ReportFile = None) -> int:
    """Explore schedules, print and write the result, and return the exit status."""
    # Import the simulator here, so that `--help` does not load it.
    from ..simulation.explore import explore, print_report
    from ..simulation.revived.revived import REVIVED_BUGS

    if exploration.revive == LIST:
        width = max(map(len, REVIVED_BUGS))
        for bug in REVIVED_BUGS.values():
            print(f"{bug.name:{width}}  {bug.about}")
        return 0
    try:
        found = explore(exploration, begin=partial(work_for, os.getpid()))
    except LockstepError:
        raise
    except Exception as error:  # noqa: BLE001 - status 1 says that a schedule has shown a fault.
        traceback.print_exc()
        say(f"the simulator failed: {type(error).__name__}: {error}")
        return EXIT_BROKE_DOWN
    write_report(report, found)
    print_report(found)
    if found["violations"]:
        return EXIT_FAULT
    return 0 if exploration.revive is None else EXIT_NOT_FOUND
