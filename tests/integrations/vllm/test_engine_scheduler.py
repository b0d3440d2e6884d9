"""vLLM's own scheduler: failing loads, calls to the connector's worker side, a repeated handshake.

The cases of failing loads are those of vLLM 0.32's `test_kv_load_failure_recovery.py` that concern
asynchronous loads, the only kind that Lockstep has. Each runs with one step at a time and with steps
scheduled ahead.
"""

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.vllm.tracked import PassResult
from lockstep.ranks.protocol.orders import CopyToHost, Direction, Fence
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.ranks.one_scheduler import DecidedRanksInTurn

if TYPE_CHECKING:
    from lockstep.integrations.vllm.worker_modes import RemoteScheduler
    from tests.kit.vllm.real_scheduler import Served

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

BLOCK_TOKENS = 32
BLOCKS = 64
PROMPT = list(range(10, 10 + 4 * BLOCK_TOKENS + 1))
OTHER = list(range(300, 300 + 3 * BLOCK_TOKENS + 1))
TOKENS = list(range(2 * PAGE_TOKENS))


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def served(request: pytest.FixtureRequest, model: Path) -> "Served":
    """A scheduler whose host memory has two prompts, while vLLM's prefix cache is empty."""
    kit = imported("tests.kit.vllm.real_scheduler")
    served: Served = kit.Served(model, BLOCKS, ahead=request.param)
    served.send("first", PROMPT)
    served.send("second", OTHER)
    served.run()
    assert served.scheduler.reset_prefix_cache()
    return served


def test_what_vllm_says_was_cached_is_what_is_counted_by_tier(served: "Served") -> None:
    """Hit counts include vLLM's own prefix cache (as device hits), even if nothing is left to load."""
    for name, tokens in (("loads", PROMPT), ("has all", PROMPT), ("has some", [*PROMPT, *OTHER])):
        served.send(name, tokens)
        served.run()

    stats = served.scheduler.connector._side.cache.stats().replica

    assert stats.hit_tokens == {"device": 8 * BLOCK_TOKENS, "host": 4 * BLOCK_TOKENS, "storage": 0}
    assert sum(stats.hit_tokens.values()) == sum(served.cached.values())
    assert stats.admissions == 5
    assert stats.asked_tokens - sum(stats.missed_tokens.values()) == sum(served.cached.values())


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
    """Regression (vllm#49176): a request was offered the same failing load forever."""
    free = served.free_blocks
    served.failing = {1}
    requests = [served.send(f"r{at}", tokens) for at, tokens in enumerate((PROMPT, OTHER))]

    served.run()

    assert served.loads_failed == 2
    assert [each.num_output_tokens for each in requests] == [2, 2]
    assert served.free_blocks == free


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


def half(ranks: DecidedRanksInTurn, *, drafts_last: bool) -> "RemoteScheduler":
    made: RemoteScheduler = imported("lockstep.integrations.vllm.worker_modes").RemoteScheduler(
        ranks.workers[0], 1.0, drafts_last=drafts_last
    )
    return made


def next_pass(ranks: DecidedRanksInTurn) -> Any:
    ranks.scheduler_cache.end_step()
    metadata = imported("lockstep.integrations.vllm.worker_modes").PassMetadata
    return metadata(PassResult((), (), ()), ranks.scheduler_cache.dispatch())


def test_an_engine_that_wakes_up_and_repeats_the_handshake_goes_on(served: "Served") -> None:
    """After a sleep, vLLM 0.33 repeats the handshake; the scheduler keeps its cache."""
    served.tell_of_workers()
    served.send("again", PROMPT)

    served.run()

    assert served.cached["again"] == 4 * BLOCK_TOKENS


def test_workers_that_were_opened_anew_are_refused(served: "Served") -> None:
    with pytest.raises(ConfigError, match="have reopened their caches; restart the engine"):
        served.tell_of_workers(serving_address="elsewhere")


def test_a_worker_waits_for_its_copies_before_vllm_unmaps_its_memory() -> None:
    ranks = DecidedRanksInTurn(1)
    worker = half(ranks, drafts_last=False)
    ranks.scheduler_cache.back_up("r", TOKENS, range(2))
    worker.apply_metadata(next_pass(ranks))
    worker.begin_backups()

    worker.wait_for_copies()

    [executor] = ranks.executors
    assert executor.given(Fence) == [Fence(None, 1.0)]


def test_backups_begin_with_the_next_step_where_vllm_calls_before_its_drafter_runs() -> None:
    """Under vLLM 0.32's runner V2, backups wait for the next step: the drafter writes its KV last."""
    ranks = DecidedRanksInTurn(1)
    worker, [executor] = half(ranks, drafts_last=True), ranks.executors
    ranks.scheduler_cache.back_up("r", TOKENS, range(2))
    worker.apply_metadata(next_pass(ranks))
    worker.begin_backups()
    begun = [*executor.begun]

    ranks.scheduler_cache.back_up("s", [9, *TOKENS], range(2))
    second = next_pass(ranks)
    worker.apply_metadata(second)
    worker.apply_metadata(second)
    worker.begin_backups()

    assert (begun, executor.begun) == ([], [Direction.TO_HOST])
    assert (executor.begun_after, len(executor.given(CopyToHost))) == ([1], 2)


def test_backups_that_wait_for_a_drafter_begin_before_vllm_unmaps_their_memory() -> None:
    ranks = DecidedRanksInTurn(1)
    worker = half(ranks, drafts_last=True)
    ranks.scheduler_cache.back_up("r", TOKENS, range(2))
    worker.apply_metadata(next_pass(ranks))
    worker.begin_backups()

    worker.wait_for_copies()

    assert ranks.executors[0].begun == [Direction.TO_HOST]
