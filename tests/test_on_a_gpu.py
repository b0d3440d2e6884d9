"""`make gpu` with a GPU, without one, and with a missing package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.on_a_gpu import (
    FAILED,
    LACKING,
    NEEDED,
    NO_GPU,
    ROOT,
    gpu_modules,
    pytest_command,
    run_tests,
)

SCRIPT = ROOT / "tests/on_a_gpu.py"
NO_DEVICE = "__version__ = '2'\n\n\nclass cuda:\n    is_available = staticmethod(lambda: False)\n"
"""A fake torch without a GPU, which is imported instead of the real one."""
ABSENT = 'raise ImportError("not on this machine")\n'
UNNEEDED = ("moto", "obstore", "ray")
"""Packages that Lockstep or other tests need, but GPU tests do not."""
MIXED = """
import pytest


@pytest.mark.gpu
def test_that_passes(): ...


@pytest.mark.gpu
def test_that_fails():
    assert 1 == 2


@pytest.mark.gpu
@pytest.mark.skip(reason="no second device")
def test_that_is_skipped(): ...


def test_that_needs_no_gpu(): ...
"""


def finding_first(folder: Path, **modules: str) -> dict[str, str]:
    """Return an environment in which these fake modules precede all others on Python's path."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}"}


def test_without_a_gpu_one_line_says_so_and_the_status_tells(tmp_path: Path) -> None:
    figures = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, figures],
        check=False,
        env=finding_first(tmp_path, torch=NO_DEVICE),
        capture_output=True,
        text=True,
    )

    assert done.returncode == NO_GPU
    assert done.stdout.startswith("no GPU: torch 2 of ")
    assert len(done.stdout.splitlines()) == 1
    assert not done.stderr
    assert not figures.exists()


def test_a_python_that_lacks_a_package_is_refused_in_one_line_that_names_it() -> None:
    bare = [sys.executable, "-I", "-S", str(SCRIPT), "gpu.json"]
    done = subprocess.run(bare, check=False, capture_output=True, text=True)

    assert done.returncode == LACKING
    assert f"lacks {', '.join(NEEDED)}; name another" in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_the_tests_that_need_a_gpu_import_nothing_that_may_be_missing_beside_one(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        pytest_command(gpu_modules(), "--collect-only"),
        check=False,
        cwd=ROOT,
        env=finding_first(tmp_path, **dict.fromkeys(UNNEEDED, ABSENT)),
        capture_output=True,
        text=True,
    )

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "test_a_fork_keeps_its_place_among_the_engine_s_kernels" in done.stdout


def test_what_did_not_pass_on_a_gpu_is_told_by_name_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: as in the project\n")
    (tmp_path / "test_mixed.py").write_text(MIXED, encoding="utf-8")

    found = run_tests(["test_mixed.py"], tmp_path)

    assert found["passed"] == 1
    assert found["not_passed"] == {
        "test_mixed::test_that_fails": "failure: assert 1 == 2",
        "test_mixed::test_that_is_skipped": "skipped: no second device",
    }
    assert found["ended"] == f"pytest ended with {FAILED}"
    assert not found["ok"]


def test_a_run_without_one_test_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: as in the project\n")
    (tmp_path / "test_none.py").write_text("def test_that_needs_no_gpu(): ...\n", encoding="utf-8")

    assert not run_tests(["test_none.py"], tmp_path)["ok"]
