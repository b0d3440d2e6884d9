"""The plug-in's scheduler side in vLLM's passes, on a real cache whose I/O the test controls."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.ballot import Answered
from lockstep.coordinator.divergence import first_difference
from lockstep.errors import RankUnhealthy
from lockstep.integrations.vllm.groups import EVERY_TOKEN, GroupKind, PoolGroup
from lockstep.integrations.vllm.lent_blocks import LentBlocks
from lockstep.integrations.vllm.pass_steps import LOOKUP_STEPS
from lockstep.integrations.vllm.scheduler_side import SchedulerSide
from lockstep.integrations.vllm.tracked import PassResult
from lockstep.ranks.protocol.config import Timeouts
from lockstep.ranks.protocol.orders import CopyToDevice, CopyToHost, Fence, LookUp, Put
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn
from tests.kit.vllm.sent_requests import Adapter, Blocks, Scheduled, Sent, Status
from tests.kit.vllm.sides import side_of

NOT_AT_ALL_S = 1e-4
"""A time in seconds shorter than a tick of the agreed clock."""

PROMPT = list(range(4 * PAGE_TOKENS + 1))
FULL = [PoolGroup("kv", 0, GroupKind.FULL, PAGE_TOKENS, EVERY_TOKEN)]


def scheduler(ranks: HostRanksInTurn, rank: int = 0, **options: Any) -> SchedulerSide:
    return side_of(ranks.caches[rank], LentBlocks(FULL), versions={"known": "1"}, **options)


def computed(request: Sent) -> Scheduled:
    tokens = request.num_tokens
    return Scheduled({request.request_id: tokens}, None, Blocks(lambda _: (range(tokens),)))


def backing_up(ranks: HostRanksInTurn, side: SchedulerSide, *prompts: list[int]) -> list[Sent]:
    """Let requests compute on one rank; their backups stay in flight until the test completes them."""
    requests = [Sent(tokens, request_id=str(at)) for at, tokens in enumerate(prompts)]
    for request in requests:
        side.arrived(request)
        side.end_pass(computed(request))
    side.cache.begin_backups()
    return requests


def promised() -> tuple[HostRanksInTurn, SchedulerSide, Sent]:
    """Return ranks, a scheduler side, and a request that matches four whole pages on the host."""
    ranks = HostRanksInTurn(ranks=1, store=False)
    side = scheduler(ranks)
    [first] = backing_up(ranks, side, PROMPT)
    ranks.settle()
    side.finished(first, range(4))
    side.end_pass(Scheduled())
    request = Sent(PROMPT, request_id="second")
    side.arrived(request)
    assert side.hit(request, 0) == 4 * PAGE_TOKENS
    return ranks, side, request


def abort(side: SchedulerSide, request: Sent) -> None:
    request.status = Status.FINISHED_ABORTED
    assert not side.finished(request, range(4))


def fenced(ranks: HostRanksInTurn, rank: int = 0) -> list[tuple[int, ...]]:
    """Take a rank's new fence orders; return the operations that each of them names."""
    return [order.operations or () for order in ranks.executors[rank].take(Fence)]


def test_a_request_that_was_preempted_where_nothing_is_backed_up_may_load_again() -> None:
    """A preempted request of a `kv_consumer` queries the store again.

    The scheduler side learns of the preemption only when the engine matches the request again.
    """
    ranks = HostRanksInTurn(ranks=1, timeouts=Timeouts(absence_memory_s=NOT_AT_ALL_S))
    side, request = scheduler(ranks, backs_up=False), Sent(PROMPT)
    side.arrived(request)
    assert side.hit(request, 0) is None
    ranks.executors[0].complete()
    side.end_pass(Scheduled())
    assert side.hit(request, 0) == 0
    side.end_pass(computed(request))

    side.hit(request, 0)

    assert len(ranks.executors[0].take(LookUp)) == 1


def test_a_request_that_loads_in_the_pass_that_tells_of_its_preemption_goes_on_loading() -> None:
    """If a pass reports a request's preemption and also starts its new load, the load goes on."""
    ranks = HostRanksInTurn(ranks=1, depth=1, store=False)
    side = scheduler(ranks)
    [request] = backing_up(ranks, side, PROMPT)
    ranks.executors[0].complete()
    side.end_pass(Scheduled())

    hit = side.hit(request, 0)
    side.allocated(request, (range(10, 14),), hit or 0)
    side.end_pass(Scheduled({}, {request.request_id}))
    ranks.executors[0].complete()
    result = side.end_pass(Scheduled())

    assert hit == 4 * PAGE_TOKENS
    assert (result.loaded, result.failed) == ((request.request_id,), ())


@pytest.mark.parametrize("pages", [1, 3])
def test_an_engine_that_takes_less_than_it_was_promised_gets_what_it_takes(pages: int) -> None:
    """An engine may load only some of the pages of its match, as vLLM 0.33 sometimes does."""
    ranks, side, request = promised()

    side.allocated(request, (range(10, 14),), pages * PAGE_TOKENS)
    side.end_pass(Scheduled())
    [order] = ranks.executors[0].given(CopyToDevice)
    ranks.executors[0].complete()
    result = side.end_pass(Scheduled())

    assert order.transfers[0].destinations == tuple(range(10, 10 + pages))
    assert (result.loaded, result.failed) == ((request.request_id,), ())


def test_an_engine_that_takes_a_part_of_a_page_computes_it_and_is_not_promised_it_for_ever() -> (
    None
):
    """A load that would end inside a page fails; after two such loads the request has no hit."""
    ranks, side, request = promised()
    failed: list[tuple[str, ...]] = []

    side.allocated(request, (range(10, 14),), PAGE_TOKENS + 1)
    failed.append(side.end_pass(Scheduled()).failed)
    hit = side.hit(request, 0)
    side.allocated(request, (range(10, 14),), PAGE_TOKENS + 1)
    failed.append(side.end_pass(Scheduled()).failed)

    assert (hit, side.hit(request, 0)) == (4 * PAGE_TOKENS, 0)
    assert failed == [(request.request_id,), (request.request_id,)]
    assert ranks.executors[0].given(CopyToDevice) == []


@pytest.mark.parametrize("own", [0, 1, 3, 4])
@pytest.mark.parametrize("backs_up", [True, False])
def test_what_the_engine_s_own_prefix_cache_has_is_a_hit(own: int, *, backs_up: bool) -> None:
    """Hits in vLLM's prefix cache are counted even if Lockstep loads or backs up nothing."""
    ranks = HostRanksInTurn(ranks=1, store=False)
    side, request = scheduler(ranks, backs_up=backs_up), Sent(PROMPT)
    side.arrived(request)
    assert side.hit(request, own * PAGE_TOKENS) == 0
    request.num_computed_tokens = own * PAGE_TOKENS
    tokens = request.num_tokens - request.num_computed_tokens
    side.end_pass(Scheduled({"r": tokens}, None, Blocks(lambda _: (range(5),))))
    request.num_computed_tokens = request.num_tokens
    request.all_token_ids = [*PROMPT, *range(PAGE_TOKENS)]
    side.end_pass(Scheduled({"r": 1}, None, Blocks(lambda _: (range(6),))))

    stats = side.cache.stats().replica

    assert (stats.admissions, stats.asked_tokens) == (1, 4 * PAGE_TOKENS)
    assert stats.hit_tokens == {"device": own * PAGE_TOKENS, "host": 0, "storage": 0}


def test_a_hit_is_counted_once_it_is_loaded_and_none_that_failed_is() -> None:
    ranks, side, request = promised()
    side.allocated(request, (range(4),), 4 * PAGE_TOKENS)
    side.end_pass(Scheduled())
    for executor in ranks.executors:
        executor.fail()
    ranks.settle()
    assert side.end_pass(Scheduled()).failed == ("second",)
    assert side.hit(request, 0) == 0
    side.end_pass(computed(request))

    stats = side.cache.stats().replica

    assert (stats.admissions, stats.asked_tokens) == (2, 8 * PAGE_TOKENS)
    assert stats.hit_tokens == {"device": 0, "host": 0, "storage": 0}
    assert sum(stats.missed_tokens.values()) == stats.asked_tokens


def test_an_empty_pass_waits_for_copies_only_where_nothing_computes() -> None:
    """An empty pass waits for copies unless a step is still computing, as with scheduling ahead."""
    ranks = HostRanksInTurn(ranks=1)
    side, [executor] = scheduler(ranks), ranks.executors
    [request] = backing_up(ranks, side, PROMPT)

    request.num_output_placeholders = 1
    side.end_pass(Scheduled())
    assert executor.waited_s == 0

    request.num_output_placeholders = 0
    side.end_pass(Scheduled())
    assert executor.waited_s > 0


def test_a_request_whose_adapter_s_weights_nobody_knows_is_neither_loaded_nor_backed_up() -> None:
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks)
    request = Sent(PROMPT, lora_request=Adapter("unknown", "/nowhere"))

    side.arrived(request)
    hit = side.hit(request, 0)
    side.end_pass(computed(request))
    side.cache.begin_backups()

    assert hit == 0
    assert ranks.executors[0].orders == []


def test_a_request_is_not_backed_up_any_more_once_its_adapter_is_not_trusted() -> None:
    """If a request's adapter may have changed, the request's KV is not backed up."""
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks, loads=False)
    request = Sent(PROMPT, lora_request=Adapter("known", "/nowhere"))
    side.arrived(request)

    side.arrived(Sent(request_id="other", lora_request=Adapter("unknown", "/nowhere")))
    side.end_pass(computed(request))
    side.cache.begin_backups()

    assert ranks.executors[0].take(CopyToHost) == []


def test_an_abort_waits_for_its_own_copies_alone_while_others_go_on() -> None:
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks, loads=False)
    first, _ = backing_up(ranks, side, PROMPT, [9, *PROMPT])
    backups = ranks.executors[0].take(CopyToHost)

    abort(side, first)

    assert fenced(ranks) == [(backups[0].operation,)]


def test_after_the_last_abort_no_copy_touches_any_block() -> None:
    """After the last abort, no copy reads any block; this holds for finished requests' blocks, too."""
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks, loads=False)
    first, second = backing_up(ranks, side, PROMPT, [9, *PROMPT])
    backups = ranks.executors[0].take(CopyToHost)
    assert side.finished(first, range(4))

    abort(side, second)

    assert {number for each in fenced(ranks) for number in each} == {
        each.operation for each in backups
    }


def test_a_reset_leaves_no_copy_that_touches_blocks_the_engine_has_preempted() -> None:
    """After a reset, no copy reads blocks of preempted requests: the engine may unmap them at once."""
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks, loads=False)
    backing_up(ranks, side, PROMPT)
    [backup] = ranks.executors[0].take(CopyToHost)

    side.reset()

    assert fenced(ranks) == [(backup.operation,)]


def test_a_pass_in_which_the_store_says_that_it_has_nothing_lets_the_request_compute() -> None:
    ranks = HostRanksInTurn(ranks=1, depth=1)
    side, request = scheduler(ranks, waits_in_pass=True), Sent(PROMPT)
    side.arrived(request)
    ranks.executors[0].complete()

    assert side.hit(request, 0) == 0


def test_a_pass_waits_no_longer_than_some_steps_for_a_store_that_is_silent() -> None:
    ranks = HostRanksInTurn(ranks=1, depth=1)
    side, request = scheduler(ranks, waits_in_pass=True), Sent(PROMPT)
    side.arrived(request)
    before = ranks.caches[0].stats().steps

    assert side.hit(request, 0) is None
    assert side.hit(request, 0) is None
    assert ranks.caches[0].stats().steps - before <= LOOKUP_STEPS + 1


def test_a_pass_waits_one_step_while_other_requests_compute() -> None:
    ranks = HostRanksInTurn(ranks=1, depth=1)
    side = scheduler(ranks, waits_in_pass=True)
    backing_up(ranks, side, PROMPT)
    request = Sent([9, *PROMPT], request_id="new")
    side.arrived(request)
    before = ranks.caches[0].stats().steps

    assert side.hit(request, 0) is None
    assert ranks.caches[0].stats().steps - before == 1


def test_a_pass_does_not_wait_for_what_is_being_read() -> None:
    """A pass waits until a lookup is answered, but not until the pages are read."""
    ranks = HostRanksInTurn(ranks=1, depth=1)
    side, request = scheduler(ranks, waits_in_pass=True), Sent(PROMPT)
    side.arrived(request)
    [lookup] = ranks.executors[0].take(LookUp)
    ranks.executors[0].reports.append(Answered(lookup.operation, 4))
    before = ranks.caches[0].stats().steps

    assert side.hit(request, 0) is None
    assert ranks.caches[0].stats().steps - before == 1


def test_what_a_pass_waits_for_drives_out_nothing_that_another_request_asks_for_in_it() -> None:
    """A prefetch that a pass waits for evicts no page that another request matches in that pass."""
    ranks = HostRanksInTurn(ranks=1, host_pages=8)
    side = scheduler(ranks, waits_in_pass=True)
    known, nobody_s, stored = ([at, *PROMPT] for at in range(3))
    for request in backing_up(ranks, side, known, nobody_s):
        ranks.settle()
        side.finished(request, range(4))
    waits, follows = Sent(stored[:9], request_id="waits"), Sent(known, request_id="follows")
    for request in (waits, follows):
        side.arrived(request)

    ranks.executors[0].complete(lambda key: True)

    assert side.hit(waits, 0) is None, "its pages are being read, in place of others"
    assert side.hit(follows, 0) == 4 * PAGE_TOKENS


def test_blocks_are_the_engine_s_with_the_last_token_and_fenced_by_the_next_pass() -> None:
    """If all requests have finished, `settle` frees their blocks; the next pass fences the copies."""
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks, loads=False)
    first, second, third = backing_up(ranks, side, PROMPT, [9, *PROMPT], [8, *PROMPT])
    backups = ranks.executors[0].take(CopyToHost)
    assert side.finished(first, range(4))
    side.end_pass(Scheduled({"2": 1}))
    assert side.finished(second, range(4))
    assert side.finished(third, range(4))

    settled = side.settle()
    again = side.settle()
    before = fenced(ranks)
    result = side.end_pass(Scheduled())

    assert (settled, again) == (PassResult((), (), ("0", "1", "2")), None)
    assert before == []
    assert {number for each in fenced(ranks) for number in each} == {
        each.operation for each in backups
    }
    assert result.freed == ()


def test_what_has_been_copied_by_the_last_token_is_on_its_way_to_storage() -> None:
    """Pages that are on the host when their request finishes are persisted at once.

    An idle engine takes no further step in which they could be persisted.
    """
    ranks = HostRanksInTurn(ranks=1, depth=1)
    side = scheduler(ranks, loads=False)
    [request] = backing_up(ranks, side, PROMPT)
    ranks.executors[0].complete_only(CopyToHost)
    assert side.finished(request, range(4))

    assert side.settle() == PassResult((), (), ("0",))
    assert len(ranks.executors[0].take(Put)) == 1


def test_what_was_copied_after_the_last_token_is_a_hit_for_the_next_request() -> None:
    ranks = HostRanksInTurn(ranks=1, depth=1, store=False)
    side = scheduler(ranks, waits_in_pass=True)
    [request] = backing_up(ranks, side, PROMPT)
    assert side.finished(request, range(4))
    side.settle()
    ranks.executors[0].complete()
    again = Sent(PROMPT, request_id="again")
    side.arrived(again)

    assert side.hit(again, 0) == 4 * PAGE_TOKENS


def test_a_reset_of_an_engine_that_has_nothing_to_do_leaves_no_copy_under_way() -> None:
    """After an idle engine's reset, no copy is in flight, because the engine may unmap freed blocks."""
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks, loads=False)
    [request] = backing_up(ranks, side, PROMPT)
    [backup] = ranks.executors[0].take(CopyToHost)
    side.finished(request, range(4))
    side.settle()

    side.reset()

    assert fenced(ranks)[0] == (backup.operation,)


def test_ranks_that_hear_of_aborts_in_another_order_stay_equal() -> None:
    ranks = HostRanksInTurn(depth=1)
    sides = [scheduler(ranks, rank, loads=False) for rank in range(2)]
    prompts = [PROMPT, [9, *PROMPT]]
    sent = [[Sent(each, request_id=f"{rank}{each[0]}") for each in prompts] for rank in range(2)]
    for at in range(2):
        for side, requests in zip(sides, sent, strict=True):
            side.arrived(requests[at])
            side.end_pass(computed(requests[at]))
            side.cache.begin_backups()

    for side, requests in zip(sides, (sent[0], sent[1][::-1]), strict=True):
        abort(side, requests[0])
        abort(side, requests[1])
    for side in sides:
        side.end_pass(Scheduled({"another": 1}))

    ranks.check()


def test_a_pass_that_could_not_begin_is_no_pass_and_the_next_one_ends_with_the_same_error() -> None:
    """If a pass cannot begin on an unhealthy rank, this pass and the next raise the same error.

    Neither pass counts as a step on which the ranks have agreed.
    """
    ranks = HostRanksInTurn(ranks=1)
    side = scheduler(ranks)
    ranks.executors[0].ill = "a thread has died"

    with pytest.raises(RankUnhealthy) as first:
        side.end_pass(Scheduled())
    with pytest.raises(RankUnhealthy) as second:
        side.end_pass(Scheduled())

    assert second.value is first.value


def test_a_rank_that_cannot_read_an_adapter_says_so_in_the_words_of_the_divergence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    ranks = HostRanksInTurn()
    files = [tmp_path / "adapter.safetensors", tmp_path / "nowhere"]
    sent = [Sent(PROMPT, lora_request=Adapter("ad", str(each))) for each in files]

    with caplog.at_level("INFO"):
        scheduler(ranks, 0).arrived(sent[0])
        scheduler(ranks, 1).arrived(sent[1])

    found = first_difference([each.inspection.journal.last(9) for each in ranks.caches]) or ""
    assert "rank 0: engine adapter of request 1 is files " in found
    assert "rank 1: engine adapter of request 1 is not known on this rank, which could not" in found
    assert "adapter_versions" in found
    assert "adapter 'ad' counts as files " in caplog.text
    assert "requests with adapter 'ad' are not cached" in caplog.text
