"""Control requests stored in the ranks' common store: rank 0 writes them, and other ranks read them."""

import threading
from collections.abc import Callable

import pytest

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import LockstepError, UsageError
from lockstep.ranks.group.control.stored_requests import KEY_BYTES, RequestBounds, StoredRequests
from tests.kit.waiting import GIVE_UP_S, wait_for

KEY = bytes(range(KEY_BYTES))
BOUNDS = RequestBounds(count=2, bytes_each=20, bytes=58)


class Store:
    """A store that can be made to fail, or to block its readers."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.written: list[str] = []
        self.fails = False
        self.has_failed = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.deletes = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        if self.fails:
            raise RuntimeError("Broken pipe")
        self.values[key] = value
        self.written.append(key)

    def get(self, key: str) -> bytes:
        assert self.answers.wait(GIVE_UP_S)
        if key not in self.values:
            self.has_failed.set()
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        with self.deletes:
            return self.values.pop(key, None) is not None


def test_a_rank_reads_what_it_hears_of_and_no_more() -> None:
    store = Store()
    first, other = StoredRequests(store, KEY), StoredRequests(store, KEY)
    numbers = [first.submit(content) for content in (b"a", b"b", b"c")]
    before = other.count
    other.learn(2)

    assert store.written == ["1", "2", "3"]
    assert (numbers, before, other.wait(2, GIVE_UP_S)) == ([1, 2, 3], 0, True)
    assert [other.read(1), other.read(2), other.count] == [b"a", b"b", 2]


def test_a_store_that_does_not_answer_holds_nobody() -> None:
    """Rule R10: `learn` does not block on a store that hangs, because the engine's thread calls it."""
    store = Store()
    first, other = StoredRequests(store, KEY), StoredRequests(store, KEY)
    store.answers.clear()
    for content in (b"a", b"b"):
        other.learn(first.submit(content))
    before = other.count
    store.answers.set()

    assert (before, other.wait(2, GIVE_UP_S)) == (0, True)


def test_what_could_not_be_read_is_read_later(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    first, other = StoredRequests(store, KEY), StoredRequests(store, KEY, again_s=0.0)
    kept = store.values.pop(str(first.submit(b"a")))
    other.learn(1)
    assert store.has_failed.wait(GIVE_UP_S)
    store.values["1"] = kept

    def has_come() -> bool:
        other.learn(1)
        return other.wait(1, 0.0)

    wait_for(has_come, "the request")
    assert "request 1 cannot be read yet" in caplog.text


def test_a_request_that_the_store_does_not_take_has_no_number() -> None:
    store = Store()
    requests = StoredRequests(store, KEY)
    store.fails = True
    with pytest.raises(LockstepError, match="does not accept the request: Broken pipe"):
        requests.submit(b"a")
    store.fails = False

    assert (requests.count, requests.submit(b"b")) == (0, 1)


def test_what_was_carried_out_leaves_the_store_with_the_next_request() -> None:
    store = Store()
    requests = StoredRequests(store, KEY)
    requests.submit(b"a")
    requests.let_go(1)
    requests.submit(b"b")

    assert list(store.values) == ["2"]


def test_what_is_in_the_store_cannot_be_read_and_is_gone_with_the_group() -> None:
    store = Store()
    requests = StoredRequests(store, KEY)
    requests.submit(b"s3://user:password@bucket")
    there = store.values["1"]
    requests.close()

    assert b"password" not in there
    assert store.values == {}
    with pytest.raises(LockstepError, match="the group ended before the request was executed"):
        requests.submit(b"late")
    assert store.values == {}


def test_a_store_that_does_not_answer_does_not_keep_a_group_from_ending() -> None:
    """Rule R10: a close does not wait for a store that hangs while it deletes the last request."""
    store = Store()
    requests = StoredRequests(store, KEY, again_s=0.0)
    requests.submit(b"a")
    with store.deletes:
        requests.close()
        left = list(store.values)

    wait_for(lambda: store.values == {}, "the request to be deleted")
    assert left == ["1"]


FORGED: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "changed": lambda sent: sent["2"][:-1] + bytes([sent["2"][-1] ^ 1]),
    "of another number": lambda sent: sent["1"],
    "cut off": lambda sent: sent["2"][:5],
    "empty": lambda sent: b"",
    "in plain text": lambda sent: b"drop everything",
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_request_is_one_that_is_not_there_until_rank_0_writes_it_anew(
    forged: Callable[[dict[str, bytes]], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    first, other = StoredRequests(store, KEY), StoredRequests(store, KEY, again_s=0.0)
    first.submit(b"a")
    first.submit(b"b")
    store.values["2"] = forged(store.values)
    other.learn(2)
    wait_for(lambda: "request 2 cannot be read yet: its content" in caplog.text, "the warning")
    before = other.count
    newest = first.submit(b"c")

    def has_come() -> bool:
        other.learn(newest)
        return other.wait(newest, 0.0)

    wait_for(has_come, "all requests")
    assert before == 1
    assert [other.read(each) for each in (1, 2, 3)] == [b"a", b"b", b"c"]


def test_a_request_beyond_a_bound_is_refused_until_others_were_carried_out() -> None:
    requests = StoredRequests(Store(), KEY, bounds=BOUNDS)
    with pytest.raises(UsageError, match="a request of 21 bytes, must be at most 20"):
        requests.submit(b"a" * 21)
    requests.submit(b"a" * 20)
    with pytest.raises(UsageError, match="48 bytes of requests are queued, and 11 more"):
        requests.submit(b"b" * 11)
    requests.submit(b"b")
    with pytest.raises(UsageError, match="2 requests are queued, which is the limit"):
        requests.submit(b"c")
    requests.let_go(1)

    assert requests.submit(b"c" * 20) == 3


def test_keys_of_two_groups_in_one_store_are_kept_apart() -> None:
    member = InProcessGroup(1).member(0)
    one, other = (StoredRequests(member.common_store(name), KEY) for name in ("one", "other"))
    one.submit(b"a")
    other.submit(b"b")
    one.let_go(1)
    one.submit(b"c")

    assert (one.read(2), other.read(1)) == (b"c", b"b")


def test_a_process_that_can_start_no_thread_reads_later_and_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no thread can start, as at shutdown, a close still returns, and requests are read later."""
    store = Store()
    first, other = StoredRequests(store, KEY), StoredRequests(store, KEY, again_s=0.0)
    first.submit(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        other.learn(1)
        first.close()
    other.learn(1)
    wait_for(lambda: other.count == 1, "the request")

    assert other.read(1) == b"a"


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
