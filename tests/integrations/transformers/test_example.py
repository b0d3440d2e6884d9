"""The Transformers example: outputs on two ranks without a cache, with one, and after a restart."""

import re
import sys

import pytest

from tests.kit.launch.replays import run
from tests.kit.snippets import blocks_of
from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.distributed, pytest.mark.timeout(300)]

EXAMPLE = ROOT / "examples" / "transformers_generate"
LINES_MAX = 20


def test_every_token_is_as_without_a_cache_and_what_was_computed_once_is_not_again() -> None:
    ended = run(sys.executable, EXAMPLE / "run.py", PYTHONPATH=str(ROOT / "src"))

    assert ended.status == 0, ended.out + ended.err
    reused = [int(each) for each in re.findall(r"(\d+) of 1450 tokens reused", ended.out)]
    assert reused == [0, 0, 0, 0, 1392, 1440, 1440, 1440, 1440]


def test_the_docs_show_the_program_as_it_is() -> None:
    program, page = (EXAMPLE / "generate.py").read_text(), "docs/transformers.md"
    blocks = blocks_of(page, (ROOT / page).read_text())
    [shown] = [block.text.strip() for block in blocks if block.language == "python"]

    assert shown in program
    assert len(shown.splitlines()) <= LINES_MAX
