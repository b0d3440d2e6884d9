"""Runs test modules as programs in separate processes."""

import sys

from tests.kit.source_tree import ROOT

_RUN = (
    "import runpy, sys; root = sys.argv.pop(1); sys.path[:0] = [root, root + '/src']; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def program(name: str, *arguments: object) -> list[str]:
    """Return a command that runs the module `name`, for example `tests.kit.storage.hung`.

    The command works in any directory and uses the library of this checkout. The module finds
    `arguments` as text in `sys.argv[1:]`.
    """
    return [sys.executable, "-c", _RUN, str(ROOT), name, *map(str, arguments)]
