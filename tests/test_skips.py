"""A skipped test proves nothing, so CI must not take it for a passed one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
SKIP = 'import pytest\n\n\n@pytest.mark.skip(reason="no store")\ndef test_it(): ...\n'
SKIP_MODULE = 'import pytest\n\npytest.skip("no store", allow_module_level=True)\n'
SKIP_GPU = (
    "import pytest\n\n\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('needs a CUDA device')\n"
)
XFAIL = "import pytest\n\n\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"


@pytest.mark.parametrize("source", [SKIP, SKIP_MODULE], ids=["one test", "a whole module"])
def test_a_skip_fails_in_ci_and_says_what_was_missing(source: str, tmp_path: Path) -> None:
    status, output = run_pytest(source, tmp_path, ci="true")

    assert status != pytest.ExitCode.OK
    assert "Skipped where CI=true" in output
    assert "no store" in output


def test_a_skip_is_a_skip_outside_of_ci(tmp_path: Path) -> None:
    status, output = run_pytest(SKIP, tmp_path, ci="")

    assert status == pytest.ExitCode.OK, output
    assert "1 skipped" in output


@pytest.mark.parametrize("source", [SKIP_GPU, XFAIL], ids=["a GPU test", "an expected failure"])
def test_what_no_ci_machine_can_pass_does_not_fail_in_ci(source: str, tmp_path: Path) -> None:
    status, output = run_pytest(source, tmp_path, ci="true")

    assert status == pytest.ExitCode.OK, output


def run_pytest(source: str, folder: Path, ci: str) -> tuple[int, str]:
    """Run one test module under this project's conftest, in a process of its own."""
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: as in the project\n")
    (folder / "test_one.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        check=False,
        cwd=folder,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr
