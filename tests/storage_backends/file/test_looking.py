"""`file://` with `read_only=1` reads existing objects and changes nothing in the directory."""

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from lockstep.storage_backends.registry import make_backend
from tests.kit.storage.calls import (
    get,
    listed,
    object_name,
    opened,
    opened_at,
    outcomes_of,
    page,
    put_many,
    run,
    soon,
    using,
)
from tests.kit.storage.files import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A file store with two objects, the second one corrupt."""
    store = FileStore(tmp_path / "store")

    async def fill() -> None:
        async with opened(store) as backend:
            await put_many(backend, (1, 2))

    run(fill())
    store.spoil(object_name(2))
    return store


def everything(root: Path) -> dict[Path, tuple[float, bytes]]:
    return {
        path: (path.stat().st_mtime, path.read_bytes() if path.is_file() else b"")
        for path in [root, *root.rglob("*")]
    }


def looking_at(store: FileStore) -> str:
    return f"{store.root.as_uri()}?read_only=1&ttl_s=1&quota_bytes=1&direct=1"


async def test_what_is_sound_is_read_and_what_is_bad_is_corrupt_each_time_and_stays(
    store: FileStore,
) -> None:
    before = everything(store.root)

    async with opened_at(looking_at(store)) as backend:
        each_time = [ReadOutcome.OK, ReadOutcome.CORRUPT, ReadOutcome.MISSING]
        assert [await outcomes_of(backend, (1, 2, 3)) for _ in range(2)] == [each_time] * 2
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))
        assert len(await listed(backend)) == 2

    assert everything(store.root) == before


async def test_nothing_can_be_written_or_removed_and_that_is_said_once(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    before = everything(store.root)

    async with opened_at(looking_at(store)) as backend:
        assert await put_many(backend, (1, 2, 3)) == [WriteOutcome.FAILED] * 3
        names = [object_name(number) for number in (1, 3)]
        assert await backend.remove(names, deadline=soon()) == [False, True]
    (warning,) = caplog.messages
    assert f"store {looking_at(store)}: it is open read-only" in warning
    assert everything(store.root) == before


async def test_a_store_that_is_only_looked_at_is_never_swept(store: FileStore) -> None:
    async with using(FileBackend(store.root, FileOptions(read_only=True, ttl_s=1))) as backend:
        assert backend._sweeper is None  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("there", [(), ("nowhere",)], ids=["store", "objects"])
def test_a_store_that_is_not_there_is_refused_and_not_made(
    tmp_path: Path, there: tuple[str, ...]
) -> None:
    for each in there:
        (tmp_path / each).mkdir()
    before = list(tmp_path.rglob("*"))

    with pytest.raises(ConfigError, match=r"this process may read$|no folder 'objects'"):
        run(make_backend(looking_at(FileStore(tmp_path / "nowhere"))).open())

    assert list(tmp_path.rglob("*")) == before


async def test_a_directory_that_anybody_could_have_written_to_is_refused_all_the_same(
    store: FileStore,
) -> None:
    (store.root / "objects").chmod(0o777)

    with pytest.raises(ConfigError, match="could forge pages"):
        await make_backend(looking_at(store)).open()
