"""A model on two ranks under torchrun: equal output on both, whatever one rank's store has lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.integrations.transformers import LockstepCache
from tests.kit.transformers.generated import alone, prompt, reusing
from tests.kit.transformers.group import run_ranks
from tests.kit.transformers.plan import Phase, PhaseResult
from tests.kit.transformers.stored_pages import flip, pages_in
from tests.kit.transformers.tiny_models import load

pytestmark = [pytest.mark.engines, pytest.mark.distributed, pytest.mark.timeout(300)]

PROMPT = prompt("first")
REUSED = 96


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"host_pages": 64, "max_tokens": 256, "weight_digests": str(folder)} | more


def phases(folder: Path) -> list[Phase]:
    """Return the runs to compare: without a cache, and with pages in each tier."""
    shared, own = f"file://{folder}/shared", f"file://{folder}/own/{{rank}}"
    return [
        Phase([PROMPT, PROMPT]),
        Phase([PROMPT, PROMPT], settings(folder, store=shared)),
        Phase([PROMPT], settings(folder, store=shared)),
        Phase([PROMPT], settings(folder, store=own)),
    ]


Run = tuple[Path, list[list[PhaseResult]]]


GEMMA = pytest.param("gemma3_text", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["llama", GEMMA, "gpt_oss"])
def ran(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    folders: Callable[[str], Path],
) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, run_ranks(folder / "run", folders(request.param), phases(folder))


def agree(results: list[list[PhaseResult]]) -> list[bool]:
    """Return for each phase whether outputs (to the bit) and replicas of both ranks are equal."""
    return [
        one.stats.get("digest") == other.stats.get("digest")
        and all(
            a.same_bits(b) and a.reused == b.reused
            for a, b in zip(one.outputs, other.outputs, strict=True)
        )
        for one, other in results
    ]


def exact(ran: Run, phase: int, reference: int) -> list[bool]:
    """Return for each prompt of a phase whether its output is close to that of the reference phase."""
    expected, came = (ran[1][at][0].outputs for at in (reference, phase))
    # Allow rounding: on some processors, a pass over part of the prompt sums in another order.
    return [one.near(other) for one, other in zip(came, expected, strict=False)]


def reused(ran: Run, phase: int) -> list[int]:
    return [each.reused for each in ran[1][phase][0].outputs]


def test_both_ranks_say_the_same_in_every_phase(ran: Run) -> None:
    assert agree(ran[1]) == [True] * 4
    assert {each.error for phase in ran[1] for each in phase} == {""}


@pytest.mark.parametrize(
    ("phase", "reference", "found"),
    [(1, 0, [0, REUSED]), (2, 0, [REUSED]), (3, 0, [0])],
    ids=["cold and warm", "after a restart", "another store"],
)
def test_what_is_said_is_exact_wherever_the_prefix_comes_from(
    ran: Run, phase: int, reference: int, found: list[int]
) -> None:
    assert exact(ran, phase, reference) == [True] * len(found)
    assert reused(ran, phase) == found


def test_one_rank_finds_what_two_have_written_but_for_what_each_had_whole(
    ran: Run, folders: Callable[[str], Path]
) -> None:
    """One rank finds pages that two ranks wrote, except for gpt-oss, whose heads are not sharded."""
    folder, _ = ran
    kind = folder.name.rstrip("0123456789")
    model = load(folders(kind))

    with LockstepCache.open(model, **settings(folder, store=f"file://{folder}/shared")) as cache:
        came = reusing(cache, model, PROMPT)

    assert came.near(alone(model, PROMPT))
    assert came.reused == (0 if kind == "gpt_oss" else REUSED)


def test_what_one_rank_s_store_has_lost_or_damaged_both_compute_and_other_prompts_are_noticed(
    tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    own = settings(tmp_path, store=f"file://{tmp_path}/own/{{rank}}")
    flipped = settings(tmp_path, store=f"file://{tmp_path}/flipped/{{rank}}")
    model = folders("llama")
    before = run_ranks(tmp_path / "before", model, [Phase([PROMPT]), Phase([PROMPT], own)])
    shutil.copytree(tmp_path / "own", tmp_path / "flipped")
    pages_in(tmp_path / "own" / "1")[0].unlink()
    flip(pages_in(tmp_path / "flipped" / "1")[0])

    *after, apart = run_ranks(
        tmp_path / "after",
        model,
        [Phase([PROMPT], own), Phase([PROMPT], flipped), Phase([PROMPT], own, apart=True)],
    )

    expected = before[0][0].outputs[0]
    assert agree([*before, *after]) == [True] * 4
    assert [phase[0].outputs[0].same_bits(expected) for phase in after] == [True] * 2
    assert [phase[0].outputs[0].reused < REUSED for phase in after] == [True] * 2
    assert [each.stats["corrupt"] > 0 for each in after[1]] == [False, True]
    prefix = "DivergenceError: the ranks differ in"
    assert [each.error[: len(prefix)] for each in apart] == [prefix] * 2
