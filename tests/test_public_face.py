"""The public API: the exported names, and their list in the docs."""

import re
import subprocess
import sys

import lockstep
from tests.kit.ranks.in_turn import RanksInTurn
from tests.kit.source_tree import ROOT

LISTED = re.compile(r"^(?:\| |- )`(\w+)`", re.MULTILINE)


def test_the_docs_list_every_name_that_is_exported_once_and_no_other() -> None:
    promised = LISTED.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))

    assert sorted(promised) == sorted(lockstep.__all__)


def test_every_exported_name_is_there() -> None:
    assert [name for name in lockstep.__all__ if not hasattr(lockstep, name)] == []


def test_to_import_the_package_loads_no_torch() -> None:
    """`import lockstep` does not import torch, because that takes seconds and is often not needed."""
    seen = "import lockstep, sys; print('torch' in sys.modules, hasattr(lockstep, 'nothing'))"

    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)

    assert done.stdout == "False False\n"


def test_a_cache_shows_its_configuration_and_none_of_its_parts() -> None:
    (cache,) = RanksInTurn(1).caches

    assert {name for name in vars(cache) if not name.startswith("_")} == {"config"}
