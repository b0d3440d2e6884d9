"""Loads that fail under vLLM's own scheduler: nobody hangs, no block leaks, no half-loaded one is used.

The claims are those of vLLM's own tests that drive a scheduler with a connector, as of vLLM 0.32
(`test_kv_load_failure_recovery.py`, `test_invalid_blocks_correctness.py`), as far as they are of loads
that are asynchronous, which Lockstep's always are. Those of blocks that a connector reports by their
ids within a step do not apply: it reports requests. Each holds with one step at a time and with steps
ahead.
"""

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.vllm.real_scheduler import Served

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

BLOCK_TOKENS = 32
BLOCKS = 64
PROMPT = list(range(10, 10 + 4 * BLOCK_TOKENS + 1))
OTHER = list(range(300, 300 + 3 * BLOCK_TOKENS + 1))


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def served(request: pytest.FixtureRequest, model: Path) -> "Served":
    """A scheduler whose host memory has both prompts, and whose own prefix cache has nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit = importlib.import_module("tests.kit.vllm.real_scheduler")
    served: Served = kit.Served(model, BLOCKS, ahead=request.param)
    served.send("first", PROMPT)
    served.send("second", OTHER)
    served.run()
    assert served.scheduler.reset_prefix_cache()
    return served


def test_a_warm_prompt_is_loaded_and_leaves_no_block_behind(served: "Served") -> None:
    free = served.free_blocks
    request = served.send("again", PROMPT)

    served.run()

    assert served.cached["again"] == 4 * BLOCK_TOKENS
    assert (request.num_output_tokens, served.free_blocks) == (2, free)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed_and_the_others_go_on(
    served: "Served", rank: int
) -> None:
    free = served.free_blocks
    served.failing = {rank}
    failing = served.send("failing", PROMPT)
    served.step()
    served.step()
    served.step()
    served.failing = set()
    other = served.send("other", OTHER)

    served.run()

    assert served.loads_failed == 1
    assert [each.num_output_tokens for each in (failing, other)] == [2, 2]
    assert served.cached["other"] == 3 * BLOCK_TOKENS
    assert served.free_blocks == free


def test_loads_that_fail_whenever_they_are_tried_end_in_computing(served: "Served") -> None:
    """vllm#49176: a request that is offered the same doomed load for ever."""
    free = served.free_blocks
    served.failing = {1}
    requests = [served.send(f"r{at}", tokens) for at, tokens in enumerate((PROMPT, OTHER))]

    served.run()

    assert served.loads_failed == 2
    assert [each.num_output_tokens for each in requests] == [2, 2]
    assert served.free_blocks == free


def test_blocks_of_a_failed_load_are_no_hit_of_the_engine_s_own(served: "Served") -> None:
    """They hold nothing, so a second request with the same prompt must not be given them."""
    served.failing = {0}
    served.send("failing", PROMPT)
    served.step()
    served.step()
    manager = served.scheduler.kv_cache_manager
    twin = served.send("twin", PROMPT)

    _, tokens, *_ = manager.get_computed_blocks(twin)
    served.failing = set()
    served.run()

    assert (served.loads_failed, tokens) == (1, 0)
    assert twin.num_output_tokens == 2


def test_a_request_that_is_aborted_while_it_loads_gives_its_blocks_back_once_that_is_over(
    served: "Served",
) -> None:
    free = served.free_blocks
    served.send("loading", PROMPT)
    served.step()

    served.abort("loading")
    served.run()

    assert served.free_blocks == free
    assert not served.scheduler.requests


def test_a_hit_of_the_engine_s_own_and_one_of_the_host_s_add_up(served: "Served") -> None:
    served.send("short", PROMPT[: 2 * BLOCK_TOKENS + 1])
    served.run()

    served.send("long", PROMPT)
    served.run()

    assert served.cached["long"] == 4 * BLOCK_TOKENS
