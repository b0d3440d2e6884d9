"""Modules of the tests that run as programs, in processes of their own."""

import sys

from tests.kit.source_tree import ROOT

_RUN = (
    "import runpy, sys; root = sys.argv.pop(1); sys.path[:0] = [root, root + '/src']; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def program(name: str, *arguments: object) -> list[str]:
    """Return the command that runs the module `name`, for example `tests.kit.storage.hung`.

    It works in any directory, and runs this tree's library, so a printed one replays what it has run.
    The module finds `arguments` behind `sys.argv[0]`, as text.
    """
    return [sys.executable, "-c", _RUN, str(ROOT), name, *map(str, arguments)]
