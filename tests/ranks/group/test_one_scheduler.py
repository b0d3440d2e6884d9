"""One replica in the scheduler's process serves ranks in other processes, with equal outcomes.

The workers' executors are scripted by the tests. Everything else is real, and messages between the
scheduler's process and its workers pass through their encoded form.
"""

import logging
import random
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from lockstep.coordinator.ballot import Answered, Landed
from lockstep.coordinator.collectives.engine_channel import FoldedBallots
from lockstep.coordinator.proposal import Readiness
from lockstep.errors import ConfigError, RankUnhealthy, StorageError, UsageError, WireError
from lockstep.ranks.group.one_scheduler.one_scheduler_opening import open_worker
from lockstep.ranks.group.one_scheduler.scheduler_cache import decide
from lockstep.ranks.protocol.dispatch import OPENINGS, Opened
from lockstep.ranks.protocol.orders import CopyToDevice, CopyToHost, Fence, Fetch, LookUp
from lockstep.ranks.replica.operations.requests import LoadState
from tests.kit.ranks.controlled_group import reply_to_request, socket_in
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn
from tests.kit.ranks.one_scheduler import DecidedRanksInTurn

if TYPE_CHECKING:
    from lockstep.coordinator.collectives.torch_gloo import TorchCollective

PROMPT = list(range(4 * PAGE_TOKENS))


def test_no_wait_that_cannot_be_meant_is_taken() -> None:
    scheduler_cache = DecidedRanksInTurn().scheduler_cache

    with pytest.raises(UsageError, match="idle_s is -1, must be a number from 0"):
        scheduler_cache.end_step(idle_s=-1)


def published(ranks: HostRanksInTurn) -> None:
    """Back up the prompt to host memory and persist it to storage."""
    ranks.every(lambda cache: cache.back_up("first", PROMPT, range(4)))
    ranks.settle()
    ranks.every(lambda cache: cache.release("first"))


def answers(ranks: HostRanksInTurn, seed: int) -> list[object]:
    """Return the cache's answers to random commands; after each one all operations settle."""
    rng = random.Random(seed)
    kept = [rng.choices(range(3), k=6 * PAGE_TOKENS) for _ in range(4)]
    given: list[object] = []
    for number in range(40):
        tokens = rng.choice(kept)[: rng.randint(1, 6) * PAGE_TOKENS]
        given += served(ranks, f"r{number}", tokens, preempted=rng.random() < 0.3)
        if rng.random() < 0.1:
            ranks.every(lambda cache: cache.reset())
    return given


def served(
    ranks: HostRanksInTurn, name: str, tokens: list[int], *, preempted: bool
) -> list[object]:
    ranks.every(lambda cache: cache.prefetch(name, tokens))
    ranks.settle(stored=lambda key: key[0] < 128)
    found = ranks.every(lambda cache: cache.match_host(name, tokens))
    if found:
        ranks.every(lambda cache: cache.load(name, tokens[:found], range(found // PAGE_TOKENS)))
    ranks.settle()
    state = ranks.every(lambda cache: cache.load_state(name))
    ranks.every(lambda cache: cache.back_up(name, tokens, range(len(tokens) // PAGE_TOKENS)))
    if preempted:
        ranks.every(lambda cache: cache.fence(name))
    ranks.settle()
    return [found, state, ranks.every(lambda cache: cache.release(name))]


@pytest.mark.parametrize("seed", range(5))
def test_workers_under_one_replica_come_to_what_ranks_with_a_replica_each_come_to(
    seed: int,
) -> None:
    apart, decided = HostRanksInTurn(3, host_pages=9), DecidedRanksInTurn(3, host_pages=9)

    assert answers(decided, seed) == answers(apart, seed)


def test_a_rank_that_lost_a_page_shortens_the_prefix_for_everyone() -> None:
    ranks = DecidedRanksInTurn(2)
    ranks.every(lambda cache: cache.prefetch("r", PROMPT))
    ranks.step()
    operation = ranks.take_operation(LookUp)

    ranks.executors[0].reports.append(Answered(operation, 4))
    ranks.executors[1].reports.append(Answered(operation, 3))
    ranks.step()
    ranks.step()

    fetched = [executor.take(Fetch)[0].transfers[0].keys for executor in ranks.executors]
    assert [len(keys) for keys in fetched] == [3, 3]
    ranks.report(Landed(operation, 3))
    ranks.settle()
    assert ranks.scheduler_cache.match_host("r", PROMPT) == 3 * PAGE_TOKENS


def test_a_load_is_over_once_the_slowest_worker_has_ended_it_and_fails_for_all_if_it_did() -> None:
    ranks = DecidedRanksInTurn(2)
    published(ranks)
    assert ranks.scheduler_cache.match_host("r", PROMPT) == len(PROMPT)
    ranks.scheduler_cache.load("r", PROMPT, range(4))
    ranks.step()

    ranks.executors[0].complete_only(CopyToDevice)
    ranks.step()
    assert ranks.scheduler_cache.load_state("r") is LoadState.LOADING
    ranks.executors[1].fail()
    ranks.step()
    ranks.settle()

    assert ranks.scheduler_cache.load_state("r") is LoadState.FAILED


def test_a_fold_that_lacks_a_rank_is_no_round_and_is_asked_for_again() -> None:
    ranks = DecidedRanksInTurn(2)
    ranks.scheduler_cache.back_up("r", PROMPT, range(4))
    ranks.scheduler_cache.deliver(ranks.work(ranks.schedule()))
    for executor in ranks.executors:
        executor.complete()

    ranks.scheduler_cache.deliver(ranks.work(ranks.schedule(), absent={1}))
    missed = (
        ranks.scheduler_cache.inspection.rounds,
        ranks.scheduler_cache.has_copies_in_flight("r"),
    )
    ranks.scheduler_cache.deliver(ranks.work(ranks.schedule()))
    ranks.scheduler_cache.begin_step()

    # The round in which both backups completed had no verdict. The repeated round therefore reports
    # them.
    assert missed == (2, True)
    assert (
        ranks.scheduler_cache.inspection.rounds,
        ranks.scheduler_cache.has_copies_in_flight("r"),
    ) == (2, False)


def test_a_step_that_begins_before_the_last_ballots_are_here_launches_no_round() -> None:
    """A step that starts before the last ballots arrive launches no round, as with scheduling ahead."""
    ranks = DecidedRanksInTurn(2)
    first = ranks.schedule()
    ranks.scheduler_cache.back_up("r", PROMPT, range(4))

    second = ranks.schedule()
    ranks.scheduler_cache.deliver(ranks.work(first))
    answered = ranks.work(second)
    ranks.scheduler_cache.deliver(answered)
    ranks.settle()

    assert answered is None
    assert ranks.scheduler_cache.match(PROMPT).host_tokens == len(PROMPT)


def test_blocks_that_are_to_be_overwritten_are_fenced_before_the_worker_s_step_goes_on() -> None:
    ranks = DecidedRanksInTurn(2)
    ranks.scheduler_cache.back_up("r", PROMPT, range(4))
    ranks.step()
    [backup] = {
        each.operation for executor in ranks.executors for each in executor.take(CopyToHost)
    }

    ranks.scheduler_cache.wait_for_copies()
    sent = ranks.schedule()
    for worker in ranks.workers:
        worker.apply_dispatch(sent)

    fenced = [[each.operations for each in executor.take(Fence)] for executor in ranks.executors]
    assert fenced == [[(backup,)], [(backup,)]]


def test_a_worker_waits_for_all_copies_before_its_memory_is_unmapped() -> None:
    ranks = DecidedRanksInTurn(2)
    [worker, _], [executor, _] = ranks.workers, ranks.executors

    worker.wait_for_copies(7.0)

    assert executor.take(Fence) == [Fence(None, 7.0)]


def test_a_ballot_that_leaves_before_backups_begin_tells_of_them_in_the_next_round() -> None:
    """If backups begin after the ballot was taken, the next round's ballot reports them."""
    ranks = DecidedRanksInTurn(2)
    ranks.scheduler_cache.back_up("r", PROMPT, range(4))

    for _ in range(3):
        sent = ranks.schedule()
        ballots: list[FoldedBallots | None] = []
        for worker, executor in zip(ranks.workers, ranks.executors, strict=True):
            worker.apply_dispatch(sent)
            worker.begin_loads()
            ballots.append(worker.vote())
            worker.begin_backups()
            executor.complete()
        ranks.scheduler_cache.deliver(reduce(FoldedBallots.joined, filter(None, ballots)))
    ranks.scheduler_cache.begin_step()

    assert ranks.scheduler_cache.match(PROMPT).host_tokens == len(PROMPT)
    assert not ranks.scheduler_cache.has_copies_in_flight("r")


def test_an_engine_without_requests_is_kept_stepping_as_long_as_that_helps() -> None:
    ranks = DecidedRanksInTurn(2)
    helps = [ranks.scheduler_cache.can_progress]
    ranks.scheduler_cache.back_up("r", PROMPT, range(4))
    helps.append(ranks.scheduler_cache.can_progress)
    ranks.settle()
    ranks.step()
    helps.append(ranks.scheduler_cache.can_progress)

    assert helps == [False, True, False]


def test_an_engine_that_is_paused_is_not_kept_stepping_until_storage_has_answered() -> None:
    """A paused engine need not step while a storage read for a live request is pending."""
    ranks = DecidedRanksInTurn(2)
    ranks.scheduler_cache.prefetch("r", PROMPT)
    helps = [ranks.scheduler_cache.can_progress]
    ranks.step()
    ranks.step()
    helps.append(ranks.scheduler_cache.can_progress)

    ranks.settle(stored=lambda _: True)

    assert helps == [True, False]
    assert ranks.scheduler_cache.match_host("r", PROMPT) == len(PROMPT)


def test_an_engine_is_kept_stepping_until_a_read_has_ended_that_nobody_waits_for_any_more() -> None:
    """An engine steps until the read of an aborted prefetch ends, because the read fills host pages."""
    ranks = DecidedRanksInTurn(2)
    ranks.scheduler_cache.prefetch("r", PROMPT)
    ranks.step()
    answer = Answered(1, len(PROMPT) // PAGE_TOKENS)
    ranks.executors[0].reports.append(answer)
    ranks.executors[1].reports.append(answer)
    ranks.step()
    ranks.scheduler_cache.release("r")
    ranks.step()
    ranks.step()
    helps = [ranks.scheduler_cache.can_progress]

    ranks.settle()
    ranks.step()
    helps.append(ranks.scheduler_cache.can_progress)

    assert helps == [True, False]


def test_a_worker_that_has_missed_a_dispatch_says_so_and_the_epoch_ends() -> None:
    ranks = DecidedRanksInTurn(2)
    ranks.step()
    ranks.scheduler_cache.begin_step()
    lost = ranks.schedule()
    ranks.workers[0].apply_dispatch(lost)
    ranks.scheduler_cache.deliver(ranks.workers[0].vote())

    ranks.scheduler_cache.deliver(ranks.work(ranks.schedule()))

    with pytest.raises(RankUnhealthy, match="rank 1 cannot continue"):
        ranks.scheduler_cache.begin_step()


@pytest.mark.parametrize("ready", [Readiness.READY, "no such folder"])
def test_a_store_is_attached_once_every_worker_has_it_and_refused_if_one_has_not(
    ready: Readiness | str,
) -> None:
    ranks = DecidedRanksInTurn(2, store=False)
    proposal = ranks.scheduler_cache.attach_store("memory://other")
    ranks.step()
    assert not proposal.done()

    for executor, state in zip(ranks.executors, (Readiness.READY, ready), strict=True):
        executor.staged = dict.fromkeys(executor.staged, state)
    ranks.step()
    ranks.step()

    assert proposal.done()
    assert isinstance(proposal.exception(), StorageError) is isinstance(ready, str)


def test_what_anybody_else_might_send_is_refused() -> None:
    ranks = DecidedRanksInTurn(1)
    opened = Opened(0, 1, ranks.scheduler_cache.config, ranks.scheduler_cache.inspection.config, "")

    with pytest.raises(WireError, match=r"Invalid value 'Opened' - at `\$\[0\]`"):
        ranks.workers[0].apply_dispatch(OPENINGS.encode(opened))


def test_a_depth_of_0_is_refused_before_anything_is_opened() -> None:
    ranks = DecidedRanksInTurn(1)
    member = cast("TorchCollective", ranks.group.member(0))

    with pytest.raises(ConfigError, match=r"pipeline_depth is 0, must be 1"):
        open_worker(replace(ranks.scheduler_cache.config, pipeline_depth=0), {}, member)


def test_what_an_operator_asks_for_is_carried_out_by_the_one_that_decides(tmp_path: Path) -> None:
    control = socket_in(tmp_path)
    ranks = DecidedRanksInTurn(2, control=control)
    published(ranks)

    pinned = reply_to_request(ranks.step, control, "pin", name="p", tokens=PROMPT)
    listed = reply_to_request(ranks.step, control, "list")
    ranks.scheduler_cache.abandon()

    assert pinned == {"tokens": len(PROMPT)}
    assert listed["pins"] == {"p": {"namespace": "", "tokens": len(PROMPT)}}
    assert list(tmp_path.iterdir()) == []


def test_a_log_level_reaches_the_scheduler_the_workers_and_the_engine_s_handler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Like vLLM's handler, this logging handler has its own level, and drops records below that level.
    log, handler = logging.getLogger("lockstep"), logging.NullHandler(logging.INFO)
    log.addHandler(handler)
    control = socket_in(tmp_path)
    ranks = DecidedRanksInTurn(2, control=control)
    reply_to_request(ranks.step, control, "log-level", level="info")
    ranks.scheduler_cache.log_from("debug")
    scheduler_cache = log.level
    sent = ranks.schedule()
    log.setLevel(logging.ERROR)
    ranks.work(sent)
    ranks.scheduler_cache.abandon()
    log.removeHandler(handler)

    assert caplog.text.count("logs from info on") == 3
    assert scheduler_cache == log.level == handler.level == logging.DEBUG


def test_workers_that_are_missing_are_named() -> None:
    ranks = DecidedRanksInTurn(2)
    opened = Opened(1, 3, ranks.scheduler_cache.config, ranks.scheduler_cache.inspection.config, "")

    with pytest.raises(ConfigError, match="the workers of ranks 0, 2 did not report"):
        decide([opened])


def test_workers_that_were_not_opened_together_are_refused() -> None:
    ranks = DecidedRanksInTurn(1)
    config, replica = ranks.scheduler_cache.config, ranks.scheduler_cache.inspection.config
    reports = [
        Opened(each, 2, config, replace(replica, life=bytes([each])), "") for each in range(2)
    ]

    with pytest.raises(ConfigError, match="were not opened together"):
        decide(reports)
