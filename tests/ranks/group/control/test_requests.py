"""Control requests: their valid forms, and their execution on every rank."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lockstep import LockstepError, PeerLost, UsageError
from lockstep.coordinator.collectives.in_process import MemoryStore
from lockstep.coordinator.proposal import Proposal
from lockstep.ranks.group.control.control_replies import ControlReplies
from lockstep.ranks.group.control.group_control import GroupControl
from lockstep.ranks.group.control.requests import REQUESTS, Attach, Limit, Pin, request_of
from lockstep.ranks.group.control.stored_requests import KEY_BYTES, StoredRequests
from tests.kit.ranks.in_turn import RanksInTurn

WRONG: list[tuple[object, str]] = [
    (7, "a request is a map in which `ask` is stats, or one of attach, detach"),
    ({}, "it is None"),
    ({"ask": "dorp"}, "it is 'dorp'"),
    ({"ask": ["pin"]}, "it is ['pin']"),
    ({"ask": "drop"}, "drop: Object missing required field `namespace`"),
    ({"ask": "drop", "namespace": 7}, "drop: Expected `str | null`, got `int` - at `$.namespace`"),
    ({"ask": "drop", "namespace": "\udcff"}, "drop: a message cannot be written: 'utf-8' codec"),
    ({"ask": "unpin", "name": "p", "now": True}, "unpin: Object contains unknown field `now`"),
    ({"ask": "detach", "store": "x"}, "detach: Object contains unknown field `store`"),
    (
        {"ask": "attach", "store": b"memory://"},
        "attach: Expected `str`, got `bytes` - at `$.store`",
    ),
    (
        {"ask": "limit", "namespace": "a", "host_pages": 1.5},
        "limit: Expected `int | null`, got `float` - at `$.host_pages`",
    ),
    (
        {"ask": "limit", "namespace": "a", "host_pages": True},
        "limit: Expected `int | null`, got `bool` - at `$.host_pages`",
    ),
    (
        {"ask": "limit", "namespace": "a", "host_pages": 1 << 80},
        "limit: a message cannot be written: can't serialize ints",
    ),
    (
        {"ask": "limit", "namespace": "a", "ttl_s": "1"},
        "limit: Expected `float | null`, got `str` - at `$.ttl_s`",
    ),
    (
        {"ask": "pin", "name": "p", "tokens": "1,2"},
        "pin: Expected `array`, got `str` - at `$.tokens`",
    ),
    (
        {"ask": "pin", "name": "p", "tokens": [1, "2"]},
        "pin: Expected `int`, got `str` - at `$.tokens[1]`",
    ),
    ({"ask": "pin", "name": "p", "tokens": [1 << 40]}, "tokens must be int32 token ids"),
    ({"ask": "pin", "name": "", "tokens": []}, "pin: Expected `str` of length >= 1 - at `$.name`"),
    (
        {"ask": "pin", "name": "p" * 100_000, "tokens": []},
        "pin: Expected `str` of length <= 256 - at `$.name`",
    ),
    ({"ask": "unpin", "name": "p" * 257}, "unpin: Expected `str` of length <= 256 - at `$.name`"),
    (
        {"ask": "weights", "version": ""},
        "weights: Expected `str` of length >= 1 - at `$.version`",
    ),
    ({"ask": "weights", "version": None}, "weights: Expected `str`, got `null` - at `$.version`"),
    (
        {"ask": "log-level", "level": "loud"},
        "log-level: Invalid enum value 'loud' - at `$.level`",
    ),
]


@pytest.mark.parametrize(("request_map", "why"), WRONG)
def test_a_request_that_makes_no_sense_is_refused_with_what_is_wrong(
    request_map: object, why: str
) -> None:
    with pytest.raises(UsageError) as refused:
        request_of(request_map)

    assert why in str(refused.value)


class ForgingStore(MemoryStore):
    """A store in which a third party changes every value before it is read, while `forges` is set."""

    def __init__(self) -> None:
        super().__init__({})
        self.forges = True

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value[::-1] if self.forges else value)


class Asked:
    """Ranks that take steps in turn, while a thread sends control requests to the first rank."""

    def __init__(self, *, idle_s: float = 60.0) -> None:
        self.ranks = RanksInTurn(2, logs=True)
        self.controls = [GroupControl(cache) for cache in self.ranks.caches]
        self.answering = ControlReplies(self.controls[0], self.submit, idle_s=idle_s)
        self.threads = ThreadPoolExecutor(1)
        self.number = 0

    def submit(self, content: bytes) -> int:
        self.number += 1
        assert self.ranks.logs is not None
        for log in self.ranks.logs:
            log.note(self.number, content)
        return self.number

    def ask(self, **request: object) -> "Future[object]":
        assert self.ranks.logs is not None
        expected = self.number + 1
        answer: Future[object] = self.threads.submit(self.answering.answer, request)
        assert self.ranks.logs[1].wait(expected, 60.0)
        return answer


@pytest.fixture
def group() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.threads.shutdown()


def test_nothing_is_done_before_the_step_in_which_all_ranks_have_the_request(group: Asked) -> None:
    group.ranks.compute("r", list(range(9)))
    answer = group.ask(ask="drop", namespace=None)
    nodes = [each.inspection.prefixes.tree.node_count for each in group.ranks.caches]
    group.ranks.step()
    group.ranks.step()

    assert nodes == [1, 1]
    assert answer.result(60) == {"pages": 4, "held": 0}
    assert group.ranks.every(lambda cache: cache.inspection.prefixes.tree.node_count) == 0


def test_a_group_that_computes_is_not_taken_for_idle_however_long_its_step_lasts() -> None:
    group = Asked(idle_s=0.001)
    group.ranks.every(lambda cache: cache.load_back("r", [], reserve_tokens=4))
    answer = group.ask(ask="limit", namespace="tenant", host_pages=3)

    with pytest.raises(TimeoutError):
        answer.result(0.05)
    group.ranks.step()
    group.ranks.step()
    assert answer.result(60) == {"is_known": False}
    group.threads.shutdown()


def test_a_group_that_takes_no_steps_says_so_and_does_it_when_it_does() -> None:
    group = Asked(idle_s=0.05)
    answer = group.ask(ask="limit", namespace="tenant", host_pages=3)

    with pytest.raises(LockstepError, match="queued: the engine is idle"):
        answer.result(60)
    group.ranks.step()
    group.ranks.step()
    limits = group.ranks.every(
        lambda cache: [each.namespace for each in cache.inspection.prefixes.allocator.limits.given]
    )
    group.threads.shutdown()
    assert limits == ["tenant"]


def test_whoever_waits_is_told_when_the_group_ends(group: Asked) -> None:
    answer = group.ask(ask="unpin", name="p")
    group.controls[0].close()

    with pytest.raises(LockstepError, match="the group ended before the request was executed"):
        answer.result(60)


def test_whoever_asks_for_what_ends_the_group_is_told_by_which_error(group: Asked) -> None:
    def fails(proposal: Proposal) -> None:
        raise MemoryError(proposal.store)

    group.ranks.executors[0].stage = fails  # type: ignore[method-assign]
    answer = group.ask(ask="attach", store="memory://")
    with pytest.raises(MemoryError):
        group.ranks.step()

    with pytest.raises(
        LockstepError, match=r"ended before the request was executed: MemoryError\('memory:"
    ):
        answer.result(60)


def answered(ranks: RanksInTurn, answering: ControlReplies, **request: object) -> Future[object]:
    with ThreadPoolExecutor(1) as threads:
        answer: Future[object] = threads.submit(answering.answer, request)
        while not answer.done():
            ranks.step()
    return answer


def test_a_forged_request_is_carried_out_by_no_rank_and_whoever_asks_is_told() -> None:
    ranks, store = RanksInTurn(2), ForgingStore()
    key = bytes(KEY_BYTES)
    logs = [StoredRequests(store, key, again_s=0.0) for _ in ranks.caches]
    for cache, log in zip(ranks.caches, logs, strict=True):
        cache.take_requests(log)
    first, _ = [GroupControl(cache) for cache in ranks.caches]

    def limits() -> int:
        return ranks.every(lambda cache: len(cache.inspection.prefixes.allocator.limits.given))

    refused = answered(
        ranks,
        ControlReplies(first, logs[0].submit, agreed_s=0.1, idle_s=0.1),
        ask="limit",
        namespace="tenant",
        host_pages=3,
    ).exception()
    before = limits()
    store.forges = False
    answered(ranks, ControlReplies(first, logs[0].submit, idle_s=60.0), ask="list").result()

    assert isinstance(refused, LockstepError)
    assert (before, limits()) == (0, 1)


def test_whoever_waits_is_told_by_which_error_the_group_has_ended() -> None:
    group = Asked(idle_s=0.05)
    first, second = group.ranks.caches
    second.abandon()
    first.open_round()
    with pytest.raises(PeerLost):
        first.close_round()
    answer = group.ask(ask="limit", namespace="tenant", host_pages=3)

    with pytest.raises(LockstepError, match="the group has ended: "):
        answer.result(60)
    group.threads.shutdown()


def test_what_is_asked_is_logged_without_passwords_and_prompts(
    group: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    control, ranks = group.controls[0], group.ranks
    group.submit(REQUESTS.encode((b"12345678", Attach(store="s3://me:hidden@host/bucket"))))
    group.submit(REQUESTS.encode((b"12345678", Pin(name="p", tokens=[815, 4711]))))
    group.submit(REQUESTS.encode((b"12345678", Limit(namespace="n" * 100_000, host_pages=1))))
    ranks.step()
    ranks.step()

    assert control.cache.rank == 0
    assert "hidden" not in caplog.text
    assert "4711" not in caplog.text
    assert "request: pin name='p' tokens='2 tokens' " in caplog.text
    assert "n" * 201 not in caplog.text


def test_the_statistics_of_a_cache_with_something_in_flight_are_json(group: Asked) -> None:
    group.ranks.publish("r", list(range(9)))

    stats = group.answering.answer({"ask": "stats"})

    assert stats["in_flight"] == {"backup": 1}
