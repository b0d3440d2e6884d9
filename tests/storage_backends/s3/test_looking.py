"""`s3://` with `read_only=1` reads existing objects and changes nothing in the bucket."""

import pytest

from tests.kit.launch.in_process import Run
from tests.kit.storage.calls import (
    get,
    listed,
    object_name,
    opened,
    outcomes_of,
    page,
    put_many,
    run,
    soon,
    using,
)

pytest.importorskip("obstore", reason="needs the extra s3")
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.s3.requests import S3Requests
from tests.kit.storage.s3 import BucketStore

LOOKING = "&read_only=1"


@pytest.fixture
def kept(bucket: BucketStore) -> BucketStore:
    """A store with two objects, the second one corrupt."""

    async def fill() -> None:
        async with opened(bucket) as backend:
            assert await put_many(backend, range(2)) == [WriteOutcome.OK] * 2

    run(fill())
    bucket.spoil(object_name(1))
    return bucket


async def test_what_is_there_is_read_and_listed_and_nothing_is_put_or_removed(
    kept: BucketStore,
) -> None:
    before = kept.paths()
    good, bad, _ = names = [object_name(number) for number in range(3)]
    async with kept.behind_proxy(LOOKING) as (backend, proxy):
        each_time = [ReadOutcome.OK, ReadOutcome.CORRUPT]
        assert [await outcomes_of(backend, range(2)) for _ in range(2)] == [each_time] * 2
        assert await get(backend, good) == (ReadOutcome.OK, page(0))
        assert await backend.exists(names, deadline=soon()) == [True, True, False]
        assert {each.name for each in await listed(backend)} == {good, bad}
        assert await put_many(backend, range(3)) == [WriteOutcome.FAILED] * 3
        assert await backend.remove(names, deadline=soon()) == [False, False, True]

    assert set(proxy.requests) <= {"GET", "HEAD"}
    assert kept.paths() == before


async def test_a_bucket_in_which_there_is_nothing_yet_can_be_looked_at(bucket: BucketStore) -> None:
    async with using(bucket.backend(options=LOOKING)) as backend:
        assert await listed(backend) == []
    assert bucket.paths() == []


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_the_commands_that_look_put_nothing_and_remove_nothing(
    lockstep: Run, kept: BucketStore, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    before = kept.paths()

    async def refused(*_: object) -> None:
        raise AssertionError("the bucket was to be looked at only")

    for change in ("create", "replace", "delete"):
        monkeypatch.setattr(S3Requests, change, refused)
    status, printed, stderr = lockstep(command, kept.uri())
    assert (status, stderr) == ((1, stderr) if command == "verify" else (0, ""))
    assert "object" in printed
    assert kept.paths() == before
