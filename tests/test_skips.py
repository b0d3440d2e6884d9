"""A skipped test proves nothing, so CI must treat it as failed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.source_tree import ROOT

"""And what it imports."""
SKIP = 'import pytest\n\n\n@pytest.mark.skip(reason="no store")\ndef test_it(): ...\n'
SKIP_MODULE = 'import pytest\n\npytest.skip("no store", allow_module_level=True)\n'
SKIP_GPU = (
    "import pytest\n\n\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('needs a CUDA device')\n"
)
NO_DEVICE = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
"""A fake torch without a GPU, which is also fast to import."""
XFAIL = "import pytest\n\n\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"


@pytest.fixture(scope="module")
def in_ci(tmp_path_factory: pytest.TempPathFactory) -> str:
    modules = {"skip": SKIP, "skip_module": SKIP_MODULE, "gpu": SKIP_GPU, "xfail": XFAIL}
    status, output = run_pytest(modules, tmp_path_factory.mktemp("in_ci"), ci="true")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    return output


@pytest.mark.parametrize(
    "line",
    ["ERROR test_skip.py::test_it", "ERROR test_skip_module.py"],
    ids=["one test", "a whole module"],
)
def test_a_skip_fails_in_ci_and_says_what_was_missing(in_ci: str, line: str) -> None:
    (error_line,) = [each for each in in_ci.splitlines() if each.startswith(line)]

    assert "Skipped where CI=true" in error_line
    assert "no store" in error_line


def test_a_skip_is_a_skip_outside_of_ci(tmp_path: Path) -> None:
    status, output = run_pytest({"skip": SKIP, "skip_module": SKIP_MODULE}, tmp_path, ci="")

    assert status == pytest.ExitCode.OK, output
    assert "2 skipped" in output


@pytest.mark.parametrize(
    "line",
    ["test_gpu.py::test_it SKIPPED", "test_xfail.py::test_it XFAIL"],
    ids=["a GPU test", "an expected failure"],
)
def test_what_no_ci_machine_can_pass_does_not_fail_in_ci(in_ci: str, line: str) -> None:
    assert [each for each in in_ci.splitlines() if each.startswith(line)], in_ci


def run_pytest(modules: Mapping[str, str], folder: Path, ci: str) -> tuple[int, str]:
    """Run test modules under this project's conftest in a new process."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: as in the project\n")
    (folder / "torch.py").write_text(NO_DEVICE, encoding="utf-8")
    for name, source in modules.items():
        (folder / f"test_{name}.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-v", "-rE", "--continue-on-collection-errors"),
        ],
        check=False,
        cwd=folder,
        env={**os.environ, "CI": ci, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr
