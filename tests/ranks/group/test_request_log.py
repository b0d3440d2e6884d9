"""Rule R14: a request becomes a command on all ranks in the same step, once all have it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Ballot
from lockstep.coordinator.lanes import BallotShape, LaneLayout, Voter, fold
from lockstep.coordinator.prefetch_slots import PrefetchSlots
from lockstep.coordinator.verdict import Verdicts
from lockstep.errors import DivergenceError, UsageError
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.member.request_log import AgreedRequests, RequestLog
from lockstep.ranks.replica.replica import Replica
from tests.kit.ranks.in_turn import RanksInTurn

LAYOUT = LaneLayout(epoch=1, round=1, state_digest=1, prefetch_slots=PrefetchSlots(1).freeze())

counts = st.integers(0, 1 << 40)


def voted(*requests: int | None) -> int:
    """Return the agreed number of control requests; None stands for a rank without a log."""
    shape = BallotShape(world_size=len(requests), prefetch_slots=1)
    vectors = [
        Ballot(shape, rank).fill(LAYOUT, Voter(healthy=True, time_ms=0, requests=each))
        for rank, each in enumerate(requests)
    ]
    return Verdicts(shape).read(LAYOUT, fold(vectors)).requests


@given(st.lists(st.none() | counts, min_size=1, max_size=8))
def test_the_verdict_says_how_many_requests_the_last_of_the_ranks_has(
    had: list[int | None],
) -> None:
    assert voted(*had) == min((each for each in had if each is not None), default=0)


@given(
    st.integers(1, 12).flatmap(
        lambda last: st.tuples(
            st.permutations(range(1, last + 1)), st.lists(st.integers(1, last), max_size=9)
        )
    )
)
def test_order_and_repetition_change_nothing_of_what_is_had(
    arrivals: tuple[list[int], list[int]],
) -> None:
    """Rule R13: late or repeated requests never lower a log's count, and no request is lost."""
    order, again = arrivals
    backlog = RequestLog()
    levels = [0]
    for number in order + again:
        backlog.note(number, b"%d" % number)
        levels.append(backlog.count)

    assert levels == sorted(levels)
    assert backlog.count == len(order)
    assert [backlog.read(each) for each in sorted(order)] == [b"%d" % n for n in sorted(order)]


def test_the_first_bytes_of_a_number_stay() -> None:
    backlog = RequestLog()

    assert [backlog.note(1, b"one"), backlog.note(1, b"two")] == [True, False]
    assert backlog.read(1) == b"one"


def test_requests_far_beyond_those_that_are_here_are_not_kept() -> None:
    """Rule R10: requests numbered far ahead are dropped, so that a sender cannot fill memory."""
    backlog = RequestLog(beyond_max=4)

    assert [backlog.note(number, b"") for number in (5, 4, 1, 5)] == [False, True, True, True]
    assert (backlog.count, backlog.waiting) == (1, 3)


def test_what_was_let_go_of_is_not_here_any_more_and_does_not_come_again() -> None:
    backlog = RequestLog()
    for number in (1, 2, 3):
        backlog.note(number, b"m")
    backlog.let_go(2)

    assert (backlog.note(2, b"m"), backlog.count, backlog.waiting) == (False, 3, 1)
    with pytest.raises(UsageError, match="request 2 is not available; 3 to 3 are"):
        backlog.read(2)


def test_a_wait_ends_with_the_message_or_with_its_time() -> None:
    backlog = RequestLog()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(backlog.wait, 1, 60.0)
        backlog.note(1, b"m")

        assert waiting.result(60)
    assert not backlog.wait(2, 0.0)


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def depth(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


class Obeyed:
    """Ranks in turn that accept control requests, and the requests that each rank has executed."""

    def __init__(self, ranks: int, *, depth: int = 0) -> None:
        self.ranks = RanksInTurn(ranks, depth=depth, logs=True)
        self.did: list[list[bytes]] = [[] for _ in range(ranks)]
        for cache, did in zip(self.ranks.caches, self.did, strict=True):
            cache.set_control_handler(did.append)

    def reach(self, rank: int, number: int, content: bytes) -> None:
        assert self.ranks.logs is not None
        self.ranks.logs[rank].note(number, content)


def test_a_request_is_kept_until_it_was_carried_out() -> None:
    """Rule R10: a request counts against the log's bound until it is executed."""
    group = Obeyed(1)
    assert group.ranks.logs is not None
    group.reach(0, 1, b"drop")
    kept = group.ranks.logs[0].waiting
    group.ranks.step()

    assert (kept, group.ranks.logs[0].waiting, group.did) == (1, 0, [[b"drop"]])


def test_no_rank_carries_out_what_another_does_not_have(depth: int) -> None:
    group = Obeyed(2, depth=depth)
    group.reach(0, 1, b"drop")
    for _ in range(3):
        group.ranks.step()
    before = [list(each) for each in group.did]
    group.reach(1, 1, b"drop")
    for _ in range(1 + depth):
        group.ranks.step()

    assert (before, group.did) == ([[], []], [[b"drop"], [b"drop"]])


def test_an_idle_member_waits_until_a_request_comes(depth: int) -> None:
    """An idle rank sleeps in its step until a request arrives."""
    group = Obeyed(1, depth=depth)
    assert group.ranks.logs is not None
    comes = threading.Timer(0.1, group.ranks.logs[0].note, (1, b"drop"))
    comes.start()
    group.ranks.caches[0].step(idle_s=60.0)
    comes.join()
    group.ranks.step()

    assert group.did == [[b"drop"]]


def ended_in(cache: Cache) -> tuple[int, str]:
    for step in range(1, 5):
        try:
            cache.step()
        except DivergenceError as error:
            return step, str(error)
    raise AssertionError("four rounds have passed, and no rank objects")


@pytest.mark.parametrize("others", [b"receipt", b"", b"arrivam"])
def test_ranks_that_were_handed_different_bytes_are_told_apart_by_the_message(
    depth: int, others: bytes
) -> None:
    """Rule R2: if ranks receive different bytes, digests differ once the request becomes a command."""
    group = Obeyed(2, depth=depth)
    group.reach(0, 1, b"arrival")
    group.reach(1, 1, others)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(ended_in, group.ranks.caches, timeout=60))

    assert [step for step, _ in ended] == [2 + depth] * 2
    assert len({words for _, words in ended}) == 1
    assert "(rank 0: message 1 " in ended[0][1]


def test_messages_change_the_digest_by_their_bytes_and_their_order() -> None:
    def digest_after(*contents: bytes) -> int:
        group = Obeyed(1)
        for number, content in enumerate(contents, start=1):
            group.reach(0, number, content)
        group.ranks.step()
        return group.ranks.caches[0].inspection.digest

    histories = [(), (b"a",), (b"a", b"b"), (b"b", b"a"), (b"ab",)]
    assert len({digest_after(*each) for each in histories}) == len(histories)


def test_no_message_is_a_command_out_of_its_turn_or_before_all_have_it() -> None:
    replica = Replica(RanksInTurn(1).caches[0].inspection.config)

    with pytest.raises(UsageError, match="message 2 does not follow message 0"):
        replica.commit_message(2, b"m")
    with pytest.raises(UsageError, match="message 1 is not on every rank"):
        replica.commit_message(1, b"m")


def test_a_rank_that_takes_no_requests_hears_that_there_was_one() -> None:
    requests = AgreedRequests(None)

    assert list(requests.agree(2)) == [(1, None), (2, None)]
