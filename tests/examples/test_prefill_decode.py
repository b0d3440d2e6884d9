"""The handoff example: two groups of different TP sizes, and a damaged page."""

import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit.launch.replays import Running, needs_ray, run, start
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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_if_a_rank_is_killed_both_groups_end_and_the_side_is_named(
    tmp_path: Path, side: str
) -> None:
    with (tmp_path / "errors").open("w+", encoding="utf-8") as errors:
        command = start(errors, sys.executable, RUN)
        command.wait_until(lambda: ranks_of(command, side) != [])
        ranks_of(command, side)[0].kill()
        status = command.process.wait(60)
        last_line = command.output_so_far().splitlines()[-1]

    assert (status, command.survivors()) == (1, [])
    assert f"'{side}': 1" in last_line


def ranks_of(command: Running, side: str) -> list[psutil.Process]:
    command.look()
    return [each for each in command.seen.values() if each.cmdline()[1:4] == ["-u", str(RUN), side]]
