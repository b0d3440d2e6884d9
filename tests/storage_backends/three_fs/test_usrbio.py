"""The USRBIO adapter, over a stand-in for the 3FS client.

The client can be installed only in a 3FS cluster. These tests show how the adapter uses the interface,
and nothing about 3FS itself. The storage contract covers the transferred bytes.
"""

import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from lockstep.storage_backends.error_log import ErrorLog
from lockstep.storage_backends.threaded_backend import Stop
from lockstep.storage_backends.three_fs import usrbio
from lockstep.storage_backends.three_fs.transfers import Extent, MovedObject
from lockstep.storage_backends.three_fs.usrbio import (
    ENTRIES,
    SharedSegment,
    UsrbioRing,
    UsrbioTransfers,
    choose_transfers,
)
from tests.kit.storage.calls import page, soon_off_loop
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn

BLOCK = 4096
BLOCKS = 8
MOUNT = "/mnt/3fs"
COMPLAINTS = ErrorLog("3fs:///mnt/3fs/kv")


@pytest.fixture
def client() -> UsrbioStandIn:
    return UsrbioStandIn()


@pytest.fixture
def fd(client: UsrbioStandIn, tmp_path: Path) -> Generator[int]:
    (tmp_path / "file").write_bytes(page(1, BLOCKS * BLOCK))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    client.register_fd(fd)
    yield fd
    client.deregister_fd(fd)
    os.close(fd)


@pytest.fixture
def ring(client: UsrbioStandIn) -> Generator[UsrbioRing]:
    shared = SharedSegment((ENTRIES + 1) * BLOCK)
    iovec, ioring = client.make_iovec(shared, MOUNT), client.make_ioring(MOUNT, ENTRIES)
    made = UsrbioRing(shared, iovec, ioring, reads=True)
    del iovec, ioring
    yield made
    made.close()


def wait_for_all(ring: UsrbioRing) -> dict[int, int]:
    ended: dict[int, int] = {}
    deadline = soon_off_loop()
    while ring.pending:
        assert time.monotonic() < deadline
        ended |= dict(ring.wait(1, deadline))
    return ended


def block(number: int) -> slice:
    return slice(number * BLOCK, (number + 1) * BLOCK)


def test_a_wait_returns_at_its_deadline_with_what_there_is(ring: UsrbioRing, fd: int) -> None:
    assert ring.wait(1, time.monotonic() - 1.0) == []
    ring.prepare(block(0), fd, 0, 1)
    # A prepared operation that was not submitted must not be counted as completed.
    assert ring.wait(1, time.monotonic() - 1.0) == []
    ring.submit()
    assert wait_for_all(ring) == {1: BLOCK}


def test_a_ring_that_does_not_answer_settles_only_once_it_has(
    client: UsrbioStandIn, ring: UsrbioRing, fd: int
) -> None:
    client.gate.clear()
    ring.prepare(block(0), fd, 0, 1)
    ring.submit()
    ring.prepare(block(1), fd, BLOCK, 2)
    assert ring.wait(1, time.monotonic() + 0.01) == []
    assert not ring.drain(time.monotonic() + 0.01)
    assert ring.pending == 2
    client.gate.set()
    assert ring.drain(soon_off_loop())
    assert ring.pending == 0


def test_a_closed_ring_leaves_no_link_to_its_memory(
    client: UsrbioStandIn, ring: UsrbioRing
) -> None:
    assert client.iovecs == 1
    ring.close()
    ring.close()
    assert client.iovecs == 0


def test_what_the_kernel_refuses_is_a_failure(client: UsrbioStandIn, tmp_path: Path) -> None:
    (tmp_path / "read-only").write_bytes(bytes(BLOCK))
    fd = os.open(tmp_path / "read-only", os.O_RDONLY)
    transfers = UsrbioTransfers(client, MOUNT, BLOCK, COMPLAINTS)
    transfers.register(fd)
    extents = [[Extent(fd, 0, [memoryview(bytes(BLOCK))])]]
    deadline = soon_off_loop()
    assert transfers.move(extents, Stop(deadline), deadline, reads=False) == [MovedObject.FAILED]
    transfers.close()
    transfers.deregister(fd)
    transfers.deregister(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("client", "directory", "text"),
    [
        (UsrbioStandIn(), "/mnt/3fs", "USRBIO rings on /mnt/3fs"),
        (UsrbioStandIn(), "/srv/kv", "preadv and pwritev, because /srv/kv is not on a mounted 3FS"),
        (None, "/mnt/3fs", r"preadv and pwritev, because .* is not installed"),
    ],
)
def test_usrbio_is_chosen_only_where_3fs_is_mounted(
    client: UsrbioStandIn | None, directory: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usrbio, "load_client", lambda: client)
    assert re.fullmatch(text, choose_transfers(Path(directory), BLOCK, COMPLAINTS).text)
