"""A plug-in refuses untested releases of its engine; the error names the setting that allows them."""

import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lockstep.errors import ConfigError
from lockstep.integrations.releases import UnsupportedEngine, require_release
from lockstep.integrations.sglang.identity import key_exclusions as sglang
from lockstep.integrations.vllm import key_exclusions as vllm
from tests.kit.source_tree import ROOT

LOG = logging.getLogger("lockstep.test")
WITHIN = [
    ("vllm", vllm.RELEASES, "0.32.0"),
    ("vllm", vllm.RELEASES, "0.33.2"),
    ("sglang", sglang.RELEASES, "0.5.23"),
    ("sglang", sglang.RELEASES, "0.5.23.post1"),
]
BEYOND = [
    ("vllm", vllm.RELEASES, "0.31.9"),
    ("vllm", vllm.RELEASES, "0.34.0"),
    ("vllm", vllm.RELEASES, "0.330.0"),
    ("sglang", sglang.RELEASES, "0.5.22"),
    ("sglang", sglang.RELEASES, "0.5.24"),
]


def require(
    engine: str, found: str, releases: Sequence[str], unsupported: UnsupportedEngine
) -> None:
    require_release(engine, found, releases, unsupported, where="settings", log=LOG)


def bounds_of(engine: str) -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return Requirement(project["optional-dependencies"][engine][0])


@pytest.mark.parametrize(("engine", "releases", "found"), WITHIN)
def test_a_release_of_the_extra_s_bounds_is_taken(
    engine: str, releases: Sequence[str], found: str
) -> None:
    require(engine, found, releases, UnsupportedEngine.REFUSE)

    assert bounds_of(engine).specifier.contains(found)


@pytest.mark.parametrize(("engine", "releases", "found"), BEYOND)
def test_a_release_beyond_the_extra_s_bounds_is_refused_by_name_with_the_way_to_try_it(
    engine: str, releases: Sequence[str], found: str
) -> None:
    message = (
        f"{engine} {found} is installed, but Lockstep's plug-in supports {engine}"
        f' {" and ".join(releases)}; install one of these, or set "unsupported_engine": "try" in'
        " settings"
    )

    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        require(engine, found, releases, UnsupportedEngine.REFUSE)
    assert not bounds_of(engine).specifier.contains(found)


def test_a_release_that_is_tried_anyway_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    require("vLLM", "0.34.0", vllm.RELEASES, UnsupportedEngine.TRY)

    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "vLLM 0.34.0" in caplog.text


def test_a_vllm_that_lacks_what_the_plug_in_imports_is_refused_by_name(tmp_path: Path) -> None:
    """A vLLM too old for the plug-in's imports is refused by name, before any setting is read."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.31.0'\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])

    ended = subprocess.run(
        [sys.executable, "-c", "from lockstep.integrations.vllm import LockstepConnector"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Lockstep: Lockstep's plug-in supports vLLM 0.32 and 0.33, and cannot" in ended.stderr
    assert "under vLLM 0.31.0: No module named 'vllm." in ended.stderr
