"""Two simulated groups, a producer and a consumer of handoffs: `lockstep simulate --pd`.

A failing seed prints the command that replays it.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lockstep.coordinator.operation import Outcome
from lockstep.ranks.protocol.agreed_pools import pool_layouts
from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import ExplorationReport, explore, print_report, quiet_log
from lockstep.simulation.pair import PairSchedule, PairWorld, draw_pair
from lockstep.simulation.rank.simulated_peers import PAGES_GONE, PAGES_READ, SimulatedPeers
from lockstep.simulation.result import ScheduleResult
from lockstep.simulation.world.faults import Mishap
from lockstep.simulation.world.models import MODEL_PROFILES
from lockstep.simulation.world.world import DRAWN, PAIRS


def run(world: PairWorld) -> ScheduleResult:
    with quiet_log():
        return PairSchedule(world).run()


def found(results: list[ScheduleResult]) -> list[str]:
    violations = [each.violation for each in results if each.violation is not None]
    return [f"{each.finding}\n  replay: {each.replay}" for each in violations]


def explored(seeds: range, **options: str) -> ExplorationReport:
    whole = {"seeds": seeds, "pd": DRAWN, **options}
    return explore(Exploration(**whole), processes=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results() -> list[ScheduleResult]:
    return [run(draw_pair(seed, pd=pd, depth=seed % 2)) for seed, pd in enumerate(PAIRS)]


def test_no_schedule_of_two_groups_of_any_sizes_has_a_violation(
    results: list[ScheduleResult],
) -> None:
    assert found(results) == []
    assert {each.pd for each in results} == set(PAIRS)
    assert {each.collectives_per_step_max for each in results} == {1}


def test_in_most_schedules_the_consumer_reads_pages_of_the_producer(
    results: list[ScheduleResult],
) -> None:
    reading = [each for each in results if each.coverage[PAGES_READ]]
    assert len(reading) > 0.6 * len(results)
    assert sum(each.coverage[PAGES_READ] for each in results) > 20 * len(results)
    assert sum(each.coverage["taken over"] for each in results) > 5 * len(results)


def test_all_that_may_go_wrong_does_and_pages_are_lost_on_their_way(
    results: list[ScheduleResult],
) -> None:
    faults = {name for each in results for name in each.faults}
    assert faults == {fault.value for fault in Mishap}
    assert sum(each.coverage[PAGES_GONE] for each in results)
    outcomes = {name for each in results for name in each.outcomes}
    ends = (Outcome.COMPLETE, Outcome.PARTIAL, Outcome.MISS, Outcome.ABORTED)
    assert {f"prefetch {each.name.lower()}" for each in ends} <= outcomes
    assert {"serve aborted", "serve expired"} <= outcomes


def test_every_model_and_each_owner_of_the_device_pages_hands_over(
    results: list[ScheduleResult],
) -> None:
    reading = [each for each in results if each.coverage[PAGES_READ]]
    assert {each.profile for each in reading} == set(MODEL_PROFILES)
    owners = {"replica", "engine"}
    assert {each.l1 for each in reading} == {f"{a} to {b}" for a in owners for b in owners}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pd", PAIRS)
def test_more_schedules_of_each_pair_have_no_violation(pd: str) -> None:
    report = explore(Exploration(seeds=range(1_000, 1_025), pd=pd))
    assert [each["replay"] for each in report["violations"]] == []


def with_rates(world: PairWorld, rates: Mapping[Mishap, float]) -> PairWorld:
    """Return the two groups with these fault rates at the consumer, and no faults at the producer."""
    one, other = world.producer, world.consumer
    return replace(
        world,
        producer=replace(one, faults=replace(one.faults, rates={}, group_faults={})),
        consumer=replace(other, faults=replace(other.faults, rates=rates, group_faults={})),
    )


@pytest.mark.parametrize("fault", [Mishap.FAILED_READ, Mishap.CORRUPT_PAGE, Mishap.HUNG_READ])
def test_pages_that_are_lost_on_their_way_are_computed_by_the_consumer(fault: Mishap) -> None:
    drawn = [draw_pair(seed, pd="2x4", profile="llama", faults="calm") for seed in range(2)]
    results = [run(with_rates(world, {fault: 0.3})) for world in drawn]
    assert found(results) == []
    assert sum(each.coverage[PAGES_READ] for each in results) > 20
    assert sum(each.faults[fault] for each in results) > 20
    assert sum(each.outcomes["prefetch partial"] for each in results)


def test_a_producer_that_dies_leaves_reads_that_end_and_nothing_that_stays() -> None:
    world = with_rates(draw_pair(8, pd="4x2", profile="llama"), {})
    dying = {step: (Mishap.DEAD_RANK, step % 4) for step in range(20, 90, 5)}
    producer = replace(world.producer, faults=replace(world.producer.faults, group_faults=dying))
    result = run(replace(world, producer=producer))
    assert found([result]) == []
    assert result.faults[Mishap.DEAD_RANK] == len(dying)
    assert result.coverage[PAGES_READ]
    assert result.coverage[PAGES_GONE]


def test_a_prompt_of_less_than_a_page_that_the_cache_does_not_know_is_not_handed_over() -> None:
    assert found([run(draw_pair(20_053, pd="8x4", profile="qwen-next"))]) == []


def test_pages_with_the_data_of_another_request_are_found_after_the_handover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = SimulatedPeers.read

    def mixed_up(self: SimulatedPeers, pool: str, key: bytes) -> int | None:
        content = read(self, pool, key)
        return content if content is None else content + 1

    monkeypatch.setattr(SimulatedPeers, "read", mixed_up)
    result = run(draw_pair(0, pd="2x1", profile="llama", faults="calm"))
    assert result.violation is not None
    assert "the tree offers host kv page" in result.violation.finding


def test_incident_e_is_found_between_two_groups() -> None:
    report = explored(range(40), profile="qwen-next", revive="E")
    (violation,) = report["violations"]
    assert violation["replay"].startswith("lockstep simulate --pd ")
    assert violation["replay"].endswith(" --revive E")


def test_both_groups_serve_one_model_and_differ_in_all_else() -> None:
    world = draw_pair(5, pd="8x2", profile="hybrid-all")
    one, other = world.producer, world.consumer
    assert pool_layouts(one.config) == pool_layouts(other.config)
    assert (one.ranks, other.ranks) == (8, 2)
    assert one.faults != other.faults
    assert one.stream("workload").random() != other.stream("workload").random()


def test_the_seed_draws_the_sizes_and_the_command_that_replays_it_names_them() -> None:
    drawn = [draw_pair(seed) for seed in range(100)]
    named = [draw_pair(seed, pd=each.pd) for seed, each in enumerate(drawn)]
    assert {each.pd for each in drawn} == set(PAIRS)
    assert named == drawn
    assert f"--pd {drawn[7].pd} --seeds 7:8" in drawn[7].replay


def test_a_schedule_of_two_groups_replays_exactly() -> None:
    one, other = (PairSchedule(draw_pair(7, pd="2x2"), record=True).run() for _ in range(2))
    assert one == other
    assert len(one.transcript) > 500


def test_the_report_names_the_sizes_and_what_was_handed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(explored(range(2), pd="1x2", faults="calm"))
    printed = capsys.readouterr().out
    assert "TP sizes: 1x2 2\n" in printed
    assert "pages read from the other group" in printed
    assert printed.endswith("no violation\n")


def test_a_pair_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown pair '3x1'; known: drawn, 1x1"):
        draw_pair(0, pd="3x1")
