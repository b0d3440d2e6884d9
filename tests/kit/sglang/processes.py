"""How a driver is forked from a process that has imported SGLang.

And how programs run that import SGLang and start no engine.
"""

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from tests.kit.forks.processes import Nursery, Place
from tests.kit.programs import program
from tests.kit.source_tree import ROOT

KIT = Path(__file__).parent
ON_THE_PATH = (ROOT / "tests" / "install" / "stand_ins", KIT / "plugins", ROOT, ROOT / "src")
IMPORTED = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
DRIVER = "tests.kit.sglang.driver"


def start_forked(place: Place) -> tuple[int, Connection]:
    """Start a driver, of which also the ranks are forked; return it and what to speak through."""
    return _nursery().start(f"{DRIVER}:drive", place)


def said_by(module: str, *arguments: object) -> str:
    """Run a program that imports SGLang, and return the last line of its output."""
    finished = subprocess.run(
        program(module, *arguments),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **environment(1, ())},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout.splitlines()[-1]


def environment(tp: int, plugins: Sequence[str]) -> dict[str, str]:
    """Return what SGLang's processes need to run on a CPU, with these plug-ins."""
    cores = os.cpu_count() or 1
    paths = [*map(str, ON_THE_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_PLUGINS": ",".join(plugins) or "none",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # It would wait for five seconds before it looks at its ranks with tools that are not here.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # Two small functions would be compiled with the first request, for twenty seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Cores for each rank; without them SGLang wants a NUMA node for each.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(tp)),
    }


@cache
def _nursery() -> Nursery:
    return Nursery(IMPORTED, environment(2, ()))
