"""Let only SGLang import the placeholders for packages that have no wheels for CPUs.

Every Python process of the environment imports this module. An installed real package has precedence.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

STAND_INS = Path(__file__).parents[1] / "stand_ins"


class _StandIns:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if path is not None or "sglang" not in sys.modules:
            return None
        return PathFinder.find_spec(fullname, [str(STAND_INS)])


sys.meta_path.append(_StandIns())
