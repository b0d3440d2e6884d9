"""Run everything that needs a GPU: the tests marked `gpu`, and the copy benchmark.

    python on_a_gpu.py <file for the figures>

Nothing is installed: any Python works that has the packages below. Figures are written after each part,
so they survive the loss of the machine. Exit status: 1 if a test or copy failed, 3 without a GPU, 4 if
a package is missing.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    *("torch", "numpy", "msgspec", "xxhash", "cyclopts", "rich", "psutil"),
    *("pytest", "pytest_timeout", "hypothesis"),
)
TESTS_S = 300
TEST_S = 60
FAILED, NO_GPU, LACKING = 1, 3, 4


def gpu_modules(folder: Path = ROOT / "tests") -> list[str]:
    """Return the test modules that use the `gpu` mark, because others may need missing packages.

    Modules of Transformers are included only if it is installed.
    """
    left_out = "" if find_spec("transformers") and find_spec("accelerate") else "transformers"
    return [
        str(each)
        for each in sorted(folder.rglob("test_*.py"))
        if each.parent.name != left_out
        and ("mark.gpu" in (source := each.read_text(encoding="utf-8")) or "DEVICES" in source)
    ]


def pytest_command(modules: Sequence[str], *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--timeout={TEST_S}"),
        # Load no other plugins, because they may emit warnings, which pytest treats as errors.
        *("--disable-plugin-autoload", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
        *(*more, *modules),
    ]


def run_tests(modules: Sequence[str], folder: Path = ROOT) -> dict[str, Any]:
    """Run the tests marked `gpu`; return each test that did not pass, by name."""
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary, "results.xml")
        command = pytest_command(modules, f"--junitxml={results}")
        began = time.monotonic()
        try:
            status = subprocess.run(command, check=False, cwd=folder, timeout=TESTS_S).returncode
            ended = f"pytest ended with {status}"
        except subprocess.TimeoutExpired:
            status, ended = FAILED, f"the tests did not end within {TESTS_S} s"
        seconds = round(time.monotonic() - began, 1)
        junit_xml = results.read_text(encoding="utf-8") if results.exists() else "<none/>"
    outcomes = list(outcomes_in(junit_xml))
    passed = [name for name, outcome in outcomes if outcome == "passed"]
    others = {name: outcome for name, outcome in outcomes if outcome != "passed"}
    return {
        "command": command,
        "ended": ended,
        "seconds": seconds,
        "passed": len(passed),
        "not_passed": others,
        "ok": status == 0 and bool(passed) and not others,
    }


def outcomes_in(results: str) -> Iterator[tuple[str, str]]:
    """Yield each test's name with `passed` or its failure text, from pytest's XML results."""
    for case in ET.fromstring(results).iter("testcase"):  # noqa: S314 - our own file.
        name = f"{case.get('classname')}::{case.get('name')}"
        trouble = [f"{each.tag}: {each.get('message')}" for each in case if each.get("message")]
        yield name, "; ".join(trouble) or "passed"


def measure_copies() -> dict[str, Any]:
    """Measure copies, print tables of the figures, and return the figures in GB/s and as ratios."""
    from lockstep.benchmarks.copies import HEAD, MEGABYTES, axis_orders, measure

    figures: list[dict[str, Any]] = []
    say(HEAD)
    try:
        for figure in measure("cuda", MEGABYTES):
            say(figure.row())
            figures.append(asdict(figure))
        for page_tokens in (16, 64):
            ratios = axis_orders("cuda", MEGABYTES, page_tokens, run_pages=4)
            say(f"tokens first over heads first, pages of {page_tokens} tokens: {ratios}")
            figures.append({"axis_orders": ratios, "page_tokens": page_tokens})
    except Exception as error:  # noqa: BLE001 - that a copy fails is what this is to find out.
        say(f"the benchmark of copies failed: {error!r}")
        return {"figures": figures, "failed": repr(error), "ok": False}
    return {"figures": figures, "ok": True}


def machine() -> dict[str, str]:
    """Return a description of the machine: GPU, driver and versions."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


def driver_version() -> str:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return "unknown: there is no nvidia-smi"
    command = [nvidia_smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return (done.stdout or done.stderr).strip()


def main(figures: Path) -> int:
    if find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            say(f"no GPU: torch {torch.__version__} of {sys.executable} sees no CUDA device here")
            return NO_GPU
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        say(
            f"{sys.executable} lacks {', '.join(missing)}; name another (make gpu PYTHON=...), or"
            " install them"
        )
        return LACKING
    figures.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine()}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "tests": lambda: run_tests(gpu_modules()),
        "copies": measure_copies,
    }
    for name, part in parts.items():
        found[name] = part()
        figures.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    say(f"{found['tests']['passed']} tests passed; the figures are in {figures}")
    return 0 if found["tests"]["ok"] and found["copies"]["ok"] else FAILED


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
