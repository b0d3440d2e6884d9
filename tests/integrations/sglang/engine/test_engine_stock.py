"""What stock SGLang does on a CPU, which the tests of Lockstep under it are compared with.

One request in a batch of its own comes out bit for bit the same each time. Beside others, or in other
chunks, sums come out otherwise in the last digits, and the tokens are the same.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.sglang.engine import EngineEndedError, RunningEngine
from tests.kit.sglang.requests import RankReport, Request, differences
from tests.kit.sglang.salts_and_aborts import cached_under_salts
from tests.kit.sglang.stock import (
    PROBE,
    TOLERANCE,
    Stock,
    adapters_engine,
    hicache_engine,
    mixed_requests,
    run_stock,
)
from tests.kit.sglang.tiny_models import make_llama_adapter

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

RECEIVING = "broadcast from sglang.srt.utils.common.broadcast_pyobj"
FORWARD = "all_reduce from sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce"
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
VOTE = f"all_reduce from {TREE}._all_reduce_attn_groups"
LONG = Request(tokens=range(3, 303), output_tokens=120)


@pytest.fixture(params=["stock_tp1", "stock_tp2"])
def stock(request: pytest.FixtureRequest) -> Stock:
    """One rank, and two."""
    found: Stock = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def hicache(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Generator[RunningEngine]:
    """Two ranks with HiCache in host memory and files."""
    folder = tmp_path_factory.mktemp("hicache")
    with hicache_engine(folder, model, store=folder / "store") as engine:
        yield engine


@dataclass(frozen=True, slots=True)
class Afflicted:
    """What came of a stock SGLang of which rank 1 has two faults."""

    update: tuple[bool, str]
    log: str


@pytest.fixture(scope="module")
def afflicted(
    tmp_path_factory: pytest.TempPathFactory, model: Path, other_model: Path
) -> Afflicted:
    """An engine that was told to load weights, and then to answer a prompt twice."""
    faults = {"lie_on_rank": 1, "weights_fail_on_rank": 1}
    folder = tmp_path_factory.mktemp("afflicted")
    with RunningEngine(folder, model, plugins=(PROBE,), faults=faults) as engine:
        update = engine.update_weights(other_model)
        with pytest.raises(EngineEndedError, match="it died"):
            engine.generate([LONG, LONG], together=False)
        return Afflicted(update, engine.log())


def counted(collective: str, begin: RankReport, end: RankReport) -> int:
    """How often one rank launched a collective between two reports."""
    return end.collectives[collective] - begin.collectives.get(collective, 0)


def test_a_request_in_a_batch_of_its_own_is_answered_bit_for_bit_the_same(stock: Stock) -> None:
    assert differences(stock.cold, stock.cold_again) == []
    assert differences(stock.warm, stock.warm_again) == []


def test_what_is_cached_and_what_is_beside_a_request_changes_its_last_digits_only(
    stock: Stock,
) -> None:
    assert differences(stock.cold, stock.warm, tolerance=TOLERANCE) == []
    assert differences(stock.cold, stock.together, tolerance=TOLERANCE) == []
    cold, warm = (sum(each.cached_tokens for each in run) for run in (stock.cold, stock.warm))
    assert warm > cold > 0


@pytest.mark.slow
def test_ranks_that_are_forked_answer_bit_for_bit_as_ranks_that_are_spawned(
    tmp_path: Path, model: Path, stock_tp2: Stock
) -> None:
    with RunningEngine(tmp_path, model, plugins=(PROBE,), fresh=True) as engine:
        answers = engine.generate(mixed_requests(), together=False)

    assert differences(stock_tp2.cold, answers) == []


def test_one_rank_launches_no_collective(stock_tp1: Stock) -> None:
    assert [report.collectives for report in stock_tp1.after] == [{}]


def test_two_ranks_broadcast_once_in_each_turn_and_once_more_when_something_arrived(
    stock_tp2: Stock,
) -> None:
    before, after = stock_tp2.before, stock_tp2.after
    turns = {end.turns - begin.turns for begin, end in zip(before, after, strict=True)}
    broadcasts = {counted(RECEIVING, *reports) for reports in zip(before, after, strict=True)}

    [turn_count], [broadcast_count] = turns, broadcasts
    # Requests, two flushes, and the question for the counts; those sent together arrive as they come.
    assert 4 * len(stock_tp2.cold) < broadcast_count - turn_count <= 5 * len(stock_tp2.cold) + 3


def test_besides_those_only_the_forward_pass_has_collectives(stock_tp2: Stock) -> None:
    launched = [set(report.collectives) for report in stock_tp2.after]

    assert launched == [{RECEIVING, FORWARD}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_with_windows_is_exact_once_its_attention_reads_where_it_wrote(
    tmp_path: Path, windowed_model: Path, tp: int
) -> None:
    requests = mixed_requests(6, output_tokens=16)
    plugins = (PROBE, "cpu_windows")

    stock = run_stock(tmp_path, windowed_model, tp=tp, requests=requests, plugins=plugins)

    assert differences(stock.cold, stock.cold_again) == []
    assert differences(stock.warm, stock.warm_again) == []
    assert differences(stock.cold, stock.warm, tolerance=TOLERANCE) == []
    assert differences(stock.cold, stock.together, tolerance=TOLERANCE) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_served_and_share_nothing_with_each_other(
    tmp_path: Path, model: Path, tp: int
) -> None:
    make_llama_adapter(tmp_path / "one", seed=1)
    make_llama_adapter(tmp_path / "other", seed=2)
    names = (None, "one", "other", "one")
    requests = [Request(tokens=range(9, 209), adapter=name) for name in names]

    with adapters_engine(tmp_path, model, tp=tp) as engine:
        loaded = [
            engine.ask("load_adapter", name=name, path=str(tmp_path / name))[0]
            for name in ("one", "other")
        ]
        answers = engine.generate(requests, together=False)

    assert loaded == [True, True]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 192]
    assert len({tuple(answer.tokens) for answer in answers}) == 3
    assert differences(answers[1:2], answers[3:], tolerance=TOLERANCE) == []


def test_requests_that_were_retracted_are_answered_as_without(
    tmp_path: Path, model: Path, stock_tp2: Stock
) -> None:
    with RunningEngine(tmp_path, model, plugins=(PROBE,), faults={"retract_every": 5}) as engine:
        answers = engine.generate(mixed_requests())

    assert sum(answer.retractions for answer in answers) > 0
    assert differences(stock_tp2.cold, answers, tolerance=TOLERANCE) == []


def test_hicache_answers_as_stock_does_from_host_memory_and_from_files(
    hicache: RunningEngine, stock_tp2: Stock
) -> None:
    requests = mixed_requests()

    cold = hicache.generate(requests)
    from_host = hicache.generate(requests)
    hicache.flush()
    from_files = hicache.generate(requests)

    assert differences(stock_tp2.cold, cold, tolerance=TOLERANCE) == []
    assert differences(stock_tp2.cold, from_host, tolerance=TOLERANCE) == []
    assert differences(stock_tp2.cold, from_files, tolerance=TOLERANCE) == []
    assert sum(answer.cached_by_tier["host"] for answer in from_host) > 0
    assert sum(answer.cached_by_tier["storage"] for answer in from_files) > 0


def test_hicache_votes_in_each_iteration_besides(hicache: RunningEngine) -> None:
    before = hicache.ranks()
    hicache.generate(mixed_requests(5))
    after = hicache.ranks()

    votes = [counted(VOTE, *reports) for reports in zip(before, after, strict=True)]
    iterations = [
        end.iterations - begin.iterations for begin, end in zip(before, after, strict=True)
    ]

    assert votes == iterations


def test_requests_are_aborted_while_they_wait_and_while_they_run(hicache: RunningEngine) -> None:
    hicache.flush()
    waiting = Request(tokens=range(5, 205), output_tokens=120, abort_after=0)
    running = Request(tokens=range(7, 207), output_tokens=120, abort_after=3)

    answers = hicache.generate([LONG, waiting, running])

    assert [answer.finish for answer in answers] == ["length", "abort", "abort"]
    assert len(answers[0].tokens) == 120
    assert 3 <= len(answers[2].tokens) < 120


def test_a_prompt_that_is_too_long_is_refused(hicache: RunningEngine) -> None:
    [answer] = hicache.generate([Request(tokens=[5] * 5000)])

    assert answer.finish == "refused"
    assert "longer than the model's context length" in answer.message


def test_two_salts_share_nothing(hicache: RunningEngine) -> None:
    hicache.flush()

    assert cached_under_salts(hicache) == [0, 0, 192]


def test_weights_are_updated_while_requests_run(
    hicache: RunningEngine, model: Path, other_model: Path
) -> None:
    running = hicache.send([LONG])
    running.wait_for(tokens=4)

    hicache.pause("retract")
    update = hicache.update_weights(other_model, "trained")
    hicache.resume()
    [answer] = running.answers()
    # It says no while it still writes what the former weights have computed, and has loaded them.
    hicache.flush()
    back = hicache.update_weights(model, "default")

    assert (update[0], back[0]) == (True, True)
    assert [each["version"] for each in answer.weight_versions] == ["default", "trained"]
    assert answer.retractions == 1


def test_a_store_is_detached_and_attached_while_the_engine_runs(hicache: RunningEngine) -> None:
    hicache.flush()

    detached = hicache.ask("detach_storage")
    attached = hicache.ask(
        "attach_storage",
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config_json='{"prefetch_threshold": 16}',
        hicache_storage_prefetch_policy="wait_complete",
    )

    assert (detached[0], attached[0]) == (True, True)


def test_an_engine_that_has_slept_answers_as_before(
    hicache: RunningEngine, stock_tp2: Stock
) -> None:
    hicache.flush()

    hicache.ask("release_memory", tags=None)
    hicache.ask("resume_memory", tags=None)

    answers = hicache.generate(mixed_requests())
    assert differences(stock_tp2.cold, answers, tolerance=TOLERANCE) == []


def test_ranks_that_are_asked_to_close_end_in_time(hicache: RunningEngine) -> None:
    """The last one that uses this engine."""
    assert hicache.shutdown() == []


def test_a_rank_that_finds_nothing_where_another_does_ends_the_engine(afflicted: Afflicted) -> None:
    assert "Received data size doesn't match expected size" in afflicted.log


def test_weights_that_one_rank_cannot_load_are_told_as_loaded(afflicted: Afflicted) -> None:
    assert afflicted.update[0] is True
