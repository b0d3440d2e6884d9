"""SGLang's control requests and batches on all ranks: real caches in threads, and real stores."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from lockstep.errors import GroupError
from lockstep.integrations.sglang.scheduler_controls import SchedulerControls, batch_facts
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import Timeouts
from tests.kit.ranks.host_threads import on_every_rank
from tests.kit.ranks.in_turn import HostRanksInTurn
from tests.kit.ranks.passing_time import PassingTime
from tests.kit.sglang.sent import Computed, Mode, Sent

SAME = [Sent("a", prefix_len=0, extend_end=16)]
OTHER = [Sent("a", prefix_len=8, extend_end=16)]


def error_of(host: HostCache, call: Callable[[], object]) -> str:
    with pytest.raises(GroupError) as found:
        call()
    assert host.inspection.ended_by is found.value
    return str(found.value)


def batches(host: HostCache, *each: Sequence[Sent]) -> Computed:
    return Computed(each[host.rank])


def test_ranks_that_differ_in_a_batch_are_named_before_any_of_them_computes_it() -> None:
    """Ranks with different batches get an error before they compute, e.g. after unequal prefix hits."""

    def program(host: HostCache) -> str:
        controls = SchedulerControls(host, compare_batches=True)
        controls.batch_is_next(Computed(SAME))
        return error_of(host, lambda: controls.batch_is_next(batches(host, SAME, OTHER)))

    errors = on_every_rank(program)

    assert errors[0] == errors[1]
    assert "rank 0: engine batch EXTEND [['a', 0, 16]]" in errors[0]
    assert "rank 1: engine batch EXTEND [['a', 8, 16]]" in errors[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_compared_batch_takes_one_round_and_none_where_none_is_compared(depth: int) -> None:
    def program(host: HostCache) -> list[int]:
        rounds = [host.inspection.rounds]
        for compare_batches in (True, False):
            SchedulerControls(host, compare_batches=compare_batches).batch_is_next(Computed(SAME))
            rounds.append(host.inspection.rounds)
        return rounds

    assert on_every_rank(program, pipeline_depth=depth) == [[0, 1, 1]] * 2


def test_without_compare_batches_ranks_that_differ_are_named_in_the_next_round() -> None:
    def program(host: HostCache) -> str:
        SchedulerControls(host, compare_batches=False).batch_is_next(batches(host, SAME, OTHER))
        return error_of(host, lambda: host.step(idle_s=0.001))

    assert "rank 1: engine batch EXTEND [['a', 8, 16]]" in on_every_rank(program)[0]


def test_after_a_failure_every_rank_says_whether_it_computed_what_the_others_did(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(host: HostCache) -> None:
        controls = SchedulerControls(host, compare_batches=False)
        controls.batch_is_next(batches(host, SAME, OTHER))
        controls.batch_failed()

    caplog.set_level(logging.ERROR, logger="lockstep.integrations.sglang.scheduler_controls")
    on_every_rank(program)

    logs = [
        each.message
        for each in caplog.records
        if each.name == "lockstep.integrations.sglang.scheduler_controls"
    ]
    assert "rank 0 failed in the batch ('EXTEND', [['a', 0, 16]])" in logs
    assert "rank 1 failed in the batch ('EXTEND', [['a', 8, 16]])" in logs
    assert len([each for each in logs if "rank 1: engine batch EXTEND [['a', 8, 16]]" in each]) == 2


def test_after_a_failure_in_the_same_batch_it_says_so_and_the_group_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(host: HostCache) -> int:
        controls = SchedulerControls(host, compare_batches=False)
        controls.batch_is_next(Computed(SAME))
        controls.batch_failed()
        host.step(idle_s=0.001)
        return host.inspection.rounds

    caplog.set_level(logging.ERROR, logger="lockstep.integrations.sglang.scheduler_controls")

    assert on_every_rank(program) == [2, 2]
    assert "rank 1: no difference between the ranks so far" in caplog.text


def attach(controls: SchedulerControls, folder: Path, name: str = "") -> tuple[bool, str]:
    uri = f"file://{folder}/{name}?durability=none"
    return controls.attach("dynamic", f'{{"store": "{uri}"}}', "a model")


def test_a_store_is_named_by_its_scheme_from_when_it_is_attached_until_it_is_detached(
    tmp_path: Path,
) -> None:
    def program(host: HostCache) -> list[object]:
        controls = SchedulerControls(host, compare_batches=False)
        before = controls.storage_scheme
        attached = attach(controls, tmp_path), controls.storage_scheme
        return [before, *attached, controls.detach(), controls.storage_scheme]

    message = f"attached file://{tmp_path}/?durability=none"
    assert on_every_rank(program) == [["none", (True, message), "file", (True, ""), "none"]] * 2


def test_a_store_that_one_rank_cannot_open_is_attached_to_none(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("no folder")

    def program(host: HostCache) -> tuple[bool, str, str]:
        controls = SchedulerControls(host, compare_batches=False)
        well, why = attach(controls, tmp_path, "{rank}")
        return well, why, controls.storage_scheme

    results = on_every_rank(program)

    assert [(well, scheme) for well, _, scheme in results] == [(False, "none")] * 2
    assert all("rank 1" in why for _, why, _ in results), results


def test_what_makes_no_sense_is_refused_without_a_round() -> None:
    [host] = HostRanksInTurn(1, store=False).caches
    controls = SchedulerControls(host, compare_batches=False)

    well, why = controls.attach(
        "dynamic", '{"store": "memory://a"}', hicache_write_policy="write_through_selective"
    )

    assert not well
    assert "must stay 'write_through' as at startup" in why
    assert host.inspection.rounds == 0


def test_while_another_proposal_is_pending_both_are_refused_and_nobody_ends() -> None:
    ranks = HostRanksInTurn(1, store=False)
    [host] = ranks.caches
    controls = SchedulerControls(host, compare_batches=False)
    host.attach_store("memory://first")

    attached, detached = controls.attach("dynamic", '{"store": "memory://a"}'), controls.detach()

    assert [attached[0], detached[0]] == [False, False]
    assert all("is not decided yet" in why for _, why in (attached, detached))
    assert host.inspection.rounds == 0


def test_a_decision_that_never_comes_is_not_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = HostRanksInTurn(1, timeouts=Timeouts(open_s=5.0))
    ranks.now_ms = PassingTime(1000)
    monkeypatch.setattr(ranks.caches[0], "detach_store", Future[None])
    controls = SchedulerControls(ranks.caches[0], compare_batches=False)

    assert controls.detach() == (False, "the ranks did not decide in time")
    assert controls.storage_scheme == "memory"


BATCH = [
    Sent("a", prefix_len=4, extend_end=16, output=[7]),
    Sent("b", prefix_len=0, extend_end=None, output=[7, 8]),
]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_of_a_prefill_it_is_each_request_with_what_is_there_and_what_is_computed(
    mode: str, *, each: bool
) -> None:
    facts = batch_facts(Computed(BATCH, Mode(mode)), each=each)

    assert facts == (mode, [["a", 4, 16], ["b", 0, 0]])


def test_of_a_decode_it_is_how_many_requests_there_are() -> None:
    assert batch_facts(Computed(BATCH, Mode("DECODE")), each=False) == ("DECODE", 2)


def test_of_a_decode_that_is_compared_it_is_each_request_and_how_far_it_is() -> None:
    facts = batch_facts(Computed(BATCH, Mode("DECODE")), each=True)

    assert facts == ("DECODE", [["a", 1], ["b", 2]])
