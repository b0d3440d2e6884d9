"""The example that hands requests over: two groups of different TP size, and a page that is damaged."""

import re
import sys

import pytest

from tests.kit.launch.replays import needs_ray, run
from tests.kit.source_tree import ROOT

RUN = ROOT / "examples" / "prefill_decode" / "run.py"
SAID = re.compile(
    r"whole: 128 of 135 prompt tokens came, exact\n"
    r"damaged: (0|16|32|48|64|80|96|112) of 135 prompt tokens came, exact\n"
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "started",
    [
        pytest.param((), id="torchrun"),
        pytest.param(("--ray",), id="ray", marks=[needs_ray, pytest.mark.slow]),
    ],
)
def test_both_answers_are_exact_though_a_page_of_one_was_damaged_on_its_way(
    started: tuple[str, ...],
) -> None:
    ended = run(sys.executable, RUN, *started)

    assert ended.status == 0, ended.err[-2000:]
    assert SAID.fullmatch(ended.out), ended.out
