"""Runs SGLang for tests in forks of a process that has already imported SGLang.

The module also runs programs that import SGLang and start no engine.
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
    """Fork a driver process, which later forks its ranks; return its process id and connection."""
    return _nursery().start(f"{DRIVER}:drive", place)


def last_line_of(module: str, *arguments: object) -> str:
    """Run a program that imports SGLang; return the last line of its output."""
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
    """Return the environment that SGLang needs on a CPU with these plug-ins."""
    cores = os.cpu_count() or 1
    paths = [*map(str, ON_THE_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_PLUGINS": ",".join(plugins) or "none",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Disable crash dumps, because SGLang would wait five seconds for dump tools that are not
        # installed.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # Disable torch.compile, because compiling two small functions takes twenty seconds at the first
        # request.
        "TORCHDYNAMO_DISABLE": "1",
        # Bind each rank to a core, because otherwise SGLang requires one NUMA node per rank.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(tp)),
    }


@cache
def _nursery() -> Nursery:
    return Nursery(IMPORTED, environment(2, ()))
