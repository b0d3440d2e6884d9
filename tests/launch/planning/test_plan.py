"""`lockstep plan`: table, plot, JSON points, the size for a goal, and one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.planning.evaluation import Evaluation
from lockstep.launch.planning.plan_settings import PlanSettings, Size
from lockstep.launch.planning.workers import Workers
from tests.kit.launch.in_process import Run, refusal

KEYS = {
    *("device_gib", "host_gib", "storage_gib", "page_tokens", "policy"),
    *("hit_ratio", "ideal_ratio", "belady_ratio", "compute_saved"),
}


def read(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def write_trace(folder: Path, requests: int) -> Path:
    """Write a trace in which each prompt has 10 blocks shared by all and then 100 blocks of its own."""
    path = folder / "trace.jsonl"
    lines = (
        {
            "input_length": 110 * 512,
            "output_length": 1,
            "hash_ids": [*range(10), *range(100 * number + 10, 100 * number + 110)],
        }
        for number in range(requests)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_sweep_tells_of_every_combination(lockstep: Run, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"

    status, output, errors = lockstep(
        *("plan", "--device-gib", "1", "--host-gib", "0,2", "--page-tokens", "64,512"),
        *("--policy", "lru,lfu,fifo", "--report", report),
    )

    assert (status, errors) == (0, "")
    found = read(report)
    points = found["points"]
    assert len(points) == 12
    assert all(each.keys() >= KEYS for each in points)
    assert all(each["hit_ratio"] <= each["belady_ratio"] <= each["ideal_ratio"] for each in points)
    assert all(0 < each["compute_saved"] < each["hit_ratio"] for each in points)
    assert (found["requests"], found["settings"]["model"]) == (120, "llama")
    assert "120 requests, 297,097 tokens of prompts; Llama-3-8B in bfloat16 on 1 rank" in output
    assert all(word in output for word in ("Belady", "saved", "# hit", "1 +2 GiB, pages of 512"))
    assert max(map(len, output.splitlines())) <= 92


def test_a_store_without_a_bound_hits_what_is_ideal(lockstep: Run, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"

    status, output, _ = lockstep(
        *("plan", "--device-gib", "1", "--host-gib", "1", "--storage-gib", "0,8,inf"),
        *("--report", report),
    )

    none, bounded, unbounded = read(report)["points"]
    assert status == 0
    assert none["hit_ratio"] < bounded["hit_ratio"] == unbounded["hit_ratio"]
    assert (unbounded["hit_ratio"], unbounded["storage_gib"]) == (unbounded["ideal_ratio"], None)
    assert unbounded["hit_tokens"]["storage"] > 0
    assert unbounded["moved_gib"]["l3_to_l2"] > 0
    assert " inf " in output


@pytest.mark.parametrize("model", ["gemma", "qwen-next", "gpt-oss", "deepseek", "glm"])
def test_every_model_can_be_planned(lockstep: Run, tmp_path: Path, model: str) -> None:
    report = tmp_path / "plan.json"

    status, _, errors = lockstep(
        *("plan", "--model", model, "--tp", "2", "--device-gib", "4", "--host-gib", "4"),
        *("--requests", "40", "--report", report),
    )

    (point,) = read(report)["points"]
    assert (status, errors) == (0, "")
    assert 0 < point["hit_ratio"] <= point["belady_ratio"]


def test_twice_the_ranks_keep_twice_the_tokens_in_as_much_memory_each() -> None:
    one, two = (Evaluation(PlanSettings(requests=4, tp=tp)) for tp in (1, 2))
    size = Size(device_gib=1, host_gib=3)

    assert [2 * pages for pages in one.require(size)] == list(two.require(size))


def test_memory_far_beyond_what_the_trace_needs_costs_none() -> None:
    evaluation = Evaluation(PlanSettings(requests=4))
    ample, endless = (
        evaluation.evaluate(Size(device_gib=gib, host_gib=gib)) for gib in (64, 1 << 30)
    )

    assert endless["host_pages"] > 1000 * ample["host_pages"]
    assert endless["hit_tokens"] == ample["hit_tokens"]


def test_a_goal_is_reached_with_the_least_host_memory(lockstep: Run, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    goal = ("plan", "--device-gib", "1", "--goal", "70%", "--report", report)

    status, output, _ = lockstep(*goal)

    found = read(report)
    answer = found["goal"]["point"]
    less = answer["host_gib"] - found["goal"]["within_gib"]
    before = Evaluation(PlanSettings()).evaluate(Size(device_gib=1, host_gib=less))
    assert status == 0
    assert "To hit 70.0% of all prompt tokens, each rank needs" in output
    assert before["hit_ratio"] < 0.7 <= answer["hit_ratio"]


def test_a_goal_that_the_device_reaches_alone_takes_no_host_memory(lockstep: Run) -> None:
    status, output, _ = lockstep("plan", "--device-gib", "1", "--goal", "0.3")

    assert status == 0
    assert "needs 0 GiB of host memory" in output


def test_a_goal_that_no_cache_reaches_is_said_in_one_line_with_what_is_ideal(lockstep: Run) -> None:
    status, output, _ = lockstep("plan", "--goal", "95%")

    assert status == 1
    assert output.splitlines()[-1] == (
        "95.0% cannot be reached: an unbounded cache hits 76.0%, and no cache hits more."
    )


def test_a_prompt_that_does_not_fit_is_told(lockstep: Run, tmp_path: Path) -> None:
    trace = write_trace(tmp_path, 3)

    status, output, _ = lockstep("plan", trace, "--device-gib", "1", "--host-gib", "0")

    assert status == 0
    assert "3 requests did not fit" in output


@pytest.mark.distributed
def test_processes_side_by_side_come_to_what_one_comes_to(tmp_path: Path) -> None:
    """Workers return the same points as one process; on two cores, this trace starts workers."""
    settings = PlanSettings(trace=str(write_trace(tmp_path, 80)))
    here = Evaluation(settings)
    sizes = [Size(device_gib=gib, host_gib=20, page_tokens=512) for gib in (10, 20, 30)]

    with Workers(settings, here, len(sizes)) as workers:
        points = list(workers.evaluate(sizes))

    assert points == [here.evaluate(size) for size in sizes]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--model", "gpt-7"],
            "--model is 'gpt-7', which is neither a file or directory nor a known name",
        ),
        (["--model", "hybrid-all"], "--model is 'hybrid-all'"),
        (["--tp", "3"], "8 KV heads, which 3 ranks cannot divide evenly"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--device-gib", "much"], "--device-gib: 'much' is not numbers with commas"),
        (["--device-gib", "0"], "--device-gib 0 does not fit one page of 64 tokens"),
        (["--host-gib", "0.001"], "--host-gib 0.001 does not fit one page of 64 tokens"),
        (["--host-gib", "0", "--storage-gib", "inf"], "--storage-gib needs host memory"),
        (["--storage-gib", "-1"], "--storage-gib. Must be >= 0"),
        (["--page-tokens", "48"], "pages of 48 tokens do not fit a trace"),
        (["--policy", "mru"], "--policy is 'mru', must be one of: lfu, lru, priority, slru, fifo"),
        (["--goal", "much"], "--goal: 'much' is not a share such as 0.3 or 30%"),
        (["--goal", "30%", "--host-gib", "8"], "--goal searches for the host memory; leave out"),
        (["--goal", "30%", "--policy", "lru,lfu"], "give one value for each other size"),
        (["/nowhere/trace.jsonl"], "cannot read the trace /nowhere/trace.jsonl"),
        (["--report", "/nowhere/plan.json"], "there is no directory /nowhere"),
    ],
)
def test_wrong_input_gets_one_line_and_status_2(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    assert complaint in refusal(lockstep, "plan", *arguments)
