"""`lockstep simulate`: a summary of the schedules that were explored, a report, and a status."""

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
"""A bug was revived, and none of the schedules has found it."""
EXIT_BROKE_DOWN = 70
"""The simulation itself could not go on; nothing is known of what it was to explore."""
_USUAL: Final = Exploration()


def simulate(*, exploration: Exploration = _USUAL, report: ReportFile = None) -> int:
    """Explore schedules, print and write what came out, and return the status to exit with."""
    # The help is shown without the simulator.
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
        say(f"the simulation broke down: {type(error).__name__}: {error}")
        return EXIT_BROKE_DOWN
    write_report(report, found)
    print_report(found)
    if found["violations"]:
        return EXIT_FAULT
    return 0 if exploration.revive is None else EXIT_NOT_FOUND
