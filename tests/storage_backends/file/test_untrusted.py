"""`file://` in a directory with foreign entries: each is a miss, and no link is followed."""

import os
import resource
import socket
import stat
import tracemalloc
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.page_format.object_header import encode_header
from lockstep.page_format.object_shape import ALWAYS, ObjectShape, Part
from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from lockstep.storage_backends.file.contents import BLOCK_BYTES
from lockstep.storage_backends.file.trust import Trust
from tests.kit.storage.calls import (
    digest_of,
    get,
    listed,
    object_name,
    opened,
    opened_at,
    outcomes_of,
    page,
    put,
    put_many,
    run,
    soon,
    using,
)
from tests.kit.storage.files import (
    FileStore,
    descriptors_open,
    limited,
    modes_in,
    no_umask,
    sweeper_of,
)

NAME = object_name(1)
TERABYTES = 1 << 42


@pytest.fixture
def few_bytes() -> Generator[None]:
    """Fail the test if its Python objects ever take 16 MiB of memory or more."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def in_place_of(store: FileStore, make: Callable[[Path], object]) -> None:
    path = store.path(NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


def bind_socket(path: Path) -> None:
    # Bind with a relative path, because a socket's path is limited to 108 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        # Without the right to create a device, use a link to one: the store must not follow it either.
        path.symlink_to("/dev/zero")


def make_holes(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTES)


def claim_terabytes(path: Path) -> None:
    """Write a valid header of an object with very long parts, followed by a sparse file."""
    parts = (Part((1 << 32) - 1, ALWAYS),) * 143
    shape = ObjectShape(parts, tuple(range(len(parts))))
    header = encode_header(NAME, digest_of(NAME), 0, shape.plan(0), bytes(16 * len(parts)))
    path.write_bytes(header)
    os.truncate(path, BLOCK_BYTES + shape.nbytes)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": bind_socket,
    "a device": make_device,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "terabytes of holes": make_holes,
    "a sound header that claims terabytes": claim_terabytes,
}


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
async def test_what_is_no_object_is_a_miss_for_a_read_and_out_of_the_way_of_a_write(
    store: FileStore, strange: Callable[[Path], object]
) -> None:
    async with opened(store) as backend:
        await put(backend, NAME, page(1))
        in_place_of(store, strange)
        assert (await get(backend, NAME))[0] is ReadOutcome.CORRUPT
        assert (await get(backend, NAME))[0] is ReadOutcome.MISSING
        in_place_of(store, strange)
        # A listing must not hang on a foreign entry. It may list an entry with a valid header.
        assert len(await listed(backend)) <= 1
        assert await put(backend, NAME, page(2)) is WriteOutcome.OK
        assert await get(backend, NAME) == (ReadOutcome.OK, page(2))
        in_place_of(store, strange)
        assert await backend.remove([NAME], deadline=soon()) == [True]
        assert await backend.exists([NAME], deadline=soon()) == [False]


async def read(backend: StorageBackend) -> ReadOutcome:
    return (await get(backend, NAME))[0]


async def write(backend: StorageBackend) -> WriteOutcome:
    return await put(backend, NAME, page(2))


async def remove(backend: StorageBackend) -> list[bool]:
    return await backend.remove([NAME], deadline=soon())


@pytest.mark.parametrize("above", [0, 1], ids=["digits", "namespace"])
@pytest.mark.parametrize(
    ("first", "answer"),
    [(read, ReadOutcome.CORRUPT), (write, WriteOutcome.OK), (remove, [True])],
    ids=["read", "write", "remove"],
)
async def test_a_directory_that_is_a_link_out_of_the_store_is_not_followed(
    store: FileStore,
    tmp_path: Path,
    above: int,
    first: Callable[[StorageBackend], Awaitable[object]],
    answer: object,
) -> None:
    outside = tmp_path / "outside"
    async with opened(store) as backend:
        await put(backend, NAME, page(1))
    directory = store.path(NAME).parents[above]
    directory.rename(outside)
    directory.symlink_to(outside)
    before = sorted(outside.rglob("*"))

    async with opened(store) as backend:
        assert await listed(backend) == []
        assert await first(backend) == answer
        assert sorted(outside.rglob("*")) == before
        assert await put(backend, NAME, page(2)) in (WriteOutcome.OK, WriteOutcome.PRESENT)
        assert await get(backend, NAME) == (ReadOutcome.OK, page(2))
        assert sorted(outside.rglob("*")) == before


async def test_everything_is_for_its_owner_alone_whatever_the_umask(store: FileStore) -> None:
    with no_umask():
        async with using(FileBackend(store.root, FileOptions(ttl_s=3600))) as backend:
            await put_many(backend, (1, 2))
            store.spoil(NAME)
            assert await outcomes_of(backend, (1, 2)) == [ReadOutcome.CORRUPT, ReadOutcome.OK]
            sweeper_of(backend).turn(wanted=True)

    assert store.quarantined()
    assert modes_in(store.root) == {("directory", 0o700), ("file", 0o600)}


@pytest.mark.parametrize("below", ["", "objects", "temporary", "quarantine"])
@pytest.mark.parametrize(
    ("mode", "message", "trusts"),
    [
        (0o777, "by everybody.*chmod go-w.*trust=any", ["any"]),
        (0o770, "by group [0-9]+,.*chmod g-w.*trust=group", ["group", "any"]),
    ],
)
async def test_a_directory_that_others_can_write_to_is_refused_unless_they_are_trusted(
    store: FileStore, below: str, mode: int, message: str, trusts: list[str]
) -> None:
    (store.root / below).mkdir(parents=True)
    (store.root / below).chmod(mode)
    before = list(store.root.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        await FileBackend(store.root).open()
    assert list(store.root.rglob("*")) == before

    outcomes: list[WriteOutcome] = []
    for number, trust in enumerate(trusts):
        async with opened_at(f"{store.root.as_uri()}?trust={trust}") as backend:
            outcomes += await put_many(backend, [number])
    assert outcomes == [WriteOutcome.OK] * len(trusts)


def test_the_group_of_a_directory_is_trusted_without_everybody_else(store: FileStore) -> None:
    store.root.mkdir()
    store.root.chmod(0o777)
    with pytest.raises(ConfigError, match="by everybody"):
        run(FileBackend(store.root, FileOptions(trust=Trust.GROUP)).open())


@pytest.mark.parametrize("below", ["objects", "temporary", "quarantine"])
def test_a_directory_that_is_a_link_is_refused(
    store: FileStore, tmp_path: Path, below: str
) -> None:
    store.root.mkdir()
    (tmp_path / "outside").mkdir()
    (store.root / below).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match=f"{below} is a link"):
        run(FileBackend(store.root).open())
    assert [path.name for path in store.root.iterdir()] == [below]


def test_in_a_sticky_directory_what_others_made_first_is_refused(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store.root / "objects").mkdir(parents=True)
    store.root.chmod(0o1777)
    real_stat = os.stat

    def stat_of_another(path: Any, **named: Any) -> os.stat_result:
        fields = list(real_stat(path, **named))
        fields[stat.ST_UID] = 12345 if path == "objects" else fields[stat.ST_UID]
        return os.stat_result(fields)

    monkeypatch.setattr(os, "stat", stat_of_another)
    with pytest.raises(ConfigError, match="objects belongs to user 12345"):
        run(FileBackend(store.root).open())


async def test_nothing_that_lies_around_hinders_the_opening(store: FileStore) -> None:
    """Foreign entries in every directory of a store do not stop its opening, even with few free fds."""
    for below in (".", "objects", "temporary", "quarantine"):
        directory = store.root / below
        directory.mkdir(parents=True, exist_ok=True)
        os.mkfifo(directory / "pipe")
        (directory / "link").symlink_to("/dev/zero")
        (directory / "inside").mkdir()

    with limited(resource.RLIMIT_NOFILE, descriptors_open() + 32):
        async with opened(store) as backend:
            assert await listed(backend) == []
            assert await put(backend, NAME, page(1)) is WriteOutcome.OK
            assert await get(backend, NAME) == (ReadOutcome.OK, page(1))
