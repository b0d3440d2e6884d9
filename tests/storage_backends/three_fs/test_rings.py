"""The contract of rings, held by those of system calls and by the adapter of USRBIO.

The adapter runs over a stand-in for the client of 3FS, which cannot be installed outside of a 3FS
cluster: that shows what the adapter does with the interface, and nothing about 3FS itself.
"""

import errno
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from lockstep.storage_backends.three_fs.pread_rings import PreadRings
from lockstep.storage_backends.three_fs.ring_choice import choose_rings
from lockstep.storage_backends.three_fs.rings import Ring, RingClient
from lockstep.storage_backends.three_fs.usrbio_rings import UsrbioRings, find_mount
from tests.kit.storage.calls import page, soon_off_loop
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn

BLOCK = 4096
BLOCKS = 8
MEMORY = 16 * BLOCK


@pytest.fixture(params=["pread", "usrbio"])
def client(request: pytest.FixtureRequest) -> RingClient:
    if request.param == "pread":
        return PreadRings("a test wants them")
    return UsrbioRings(UsrbioStandIn(), "/mnt/3fs")


@pytest.fixture
def fd(client: RingClient, tmp_path: Path) -> Generator[int]:
    """A registered file of eight blocks."""
    (tmp_path / "file").write_bytes(page(1, BLOCKS * BLOCK))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    client.register(fd)
    yield fd
    client.deregister(fd)
    os.close(fd)


def ring_of(client: RingClient, *, reads: bool = True, entries: int = 8) -> Ring:
    return client.ring(reads=reads, entries=entries, memory_bytes=MEMORY)


def wait_for_all(ring: Ring) -> dict[int, int]:
    ended: dict[int, int] = {}
    deadline = soon_off_loop()
    while ring.pending:
        assert time.monotonic() < deadline
        ended |= dict(ring.wait(1, deadline))
    return ended


def block(ring: Ring, number: int) -> memoryview:
    return ring.memory[number * BLOCK : (number + 1) * BLOCK]


def test_what_was_prepared_and_submitted_is_read(client: RingClient, fd: int) -> None:
    ring = ring_of(client)
    for number in range(8):
        ring.prepare([block(ring, number)], fd, (7 - number) * BLOCK, 100 + number)
    ring.submit()
    assert wait_for_all(ring) == {100 + number: BLOCK for number in range(8)}
    expected = page(1, BLOCKS * BLOCK)
    assert [bytes(block(ring, number)) for number in range(8)] == [
        expected[at * BLOCK : (at + 1) * BLOCK] for at in reversed(range(8))
    ]
    ring.close()


def test_what_was_written_is_in_the_file(client: RingClient, fd: int) -> None:
    ring = ring_of(client, reads=False)
    content = page(2, 2 * BLOCK)
    ring.memory[: 2 * BLOCK] = content
    ring.prepare([block(ring, 0)], fd, 0, 1)
    ring.prepare([block(ring, 1)], fd, 5 * BLOCK, 2)
    ring.submit()
    assert wait_for_all(ring) == {1: BLOCK, 2: BLOCK}
    assert os.pread(fd, BLOCK, 0) + os.pread(fd, BLOCK, 5 * BLOCK) == content
    ring.close()


def test_a_full_ring_takes_nothing_until_something_came_back(client: RingClient, fd: int) -> None:
    ring = ring_of(client, entries=2)
    ring.prepare([block(ring, 0)], fd, 0, 1)
    ring.prepare([block(ring, 1)], fd, 0, 2)
    with pytest.raises(OSError, match="operations already") as caught:
        ring.prepare([block(ring, 2)], fd, 0, 3)
    assert caught.value.errno == errno.EAGAIN
    assert ring.pending == 2
    ring.submit()
    wait_for_all(ring)
    ring.prepare([block(ring, 2)], fd, 0, 3)
    ring.submit()
    assert wait_for_all(ring) == {3: BLOCK}
    ring.close()


def test_ends_need_not_come_in_order(client: RingClient, fd: int) -> None:
    ring = ring_of(client)
    for number in range(8):
        ring.prepare([block(ring, number)], fd, 0, number)
    ring.submit()
    order = list(wait_for_all(ring))
    assert order != sorted(order)
    ring.close()


def test_fewer_bytes_than_asked_for_mean_the_end_of_the_file(client: RingClient, fd: int) -> None:
    ring = ring_of(client)
    ring.prepare([ring.memory[: 3 * BLOCK]], fd, 6 * BLOCK, 1)
    ring.prepare([ring.memory[3 * BLOCK : 4 * BLOCK]], fd, 9 * BLOCK, 2)
    ring.submit()
    assert wait_for_all(ring) == {1: 2 * BLOCK, 2: 0}
    ring.close()


def test_what_the_kernel_refuses_is_a_negative_errno(client: RingClient, tmp_path: Path) -> None:
    (tmp_path / "read-only").write_bytes(b"x")
    fd = os.open(tmp_path / "read-only", os.O_RDONLY)
    client.register(fd)
    ring = ring_of(client, reads=False)
    ring.prepare([block(ring, 0)], fd, 0, 1)
    ring.submit()
    assert wait_for_all(ring) == {1: -errno.EBADF}
    ring.close()
    client.deregister(fd)
    os.close(fd)


def test_a_descriptor_is_registered_once_and_before_it_is_used(
    client: RingClient, fd: int, tmp_path: Path
) -> None:
    ring = ring_of(client)
    other = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError, match="not registered") as caught:
        ring.prepare([block(ring, 0)], other, 0, 1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="registered already") as caught:
        client.register(fd)
    assert caught.value.errno == errno.EINVAL
    client.register(other)
    client.deregister(other)
    with pytest.raises(OSError, match="not registered"):
        ring.prepare([block(ring, 0)], other, 0, 1)
    os.close(other)
    ring.close()


def test_a_wait_returns_at_its_deadline_with_what_there_is(client: RingClient, fd: int) -> None:
    ring = ring_of(client)
    assert ring.wait(1, time.monotonic() - 1.0) == []
    ring.prepare([block(ring, 0)], fd, 0, 1)
    # It was not submitted, so no wait may count on its end.
    assert ring.wait(1, time.monotonic() - 1.0) == []
    ring.submit()
    assert wait_for_all(ring) == {1: BLOCK}
    ring.close()


def test_a_ring_that_has_settled_is_empty_and_can_be_used_again(
    client: RingClient, fd: int
) -> None:
    ring = ring_of(client, entries=2)
    ring.prepare([block(ring, 0)], fd, 0, 1)
    ring.submit()
    ring.prepare([block(ring, 1)], fd, 0, 2)
    assert ring.drain(soon_off_loop())
    assert ring.pending == 0
    ring.prepare([block(ring, 2)], fd, BLOCK, 3)
    ring.submit()
    assert wait_for_all(ring) == {3: BLOCK}
    assert block(ring, 2) == page(1, BLOCKS * BLOCK)[BLOCK : 2 * BLOCK]
    ring.close()


def test_closing_twice_is_closing_once(client: RingClient) -> None:
    ring = ring_of(client)
    ring.close()
    ring.close()


def test_rings_of_system_calls_take_any_memory_in_any_number_of_pieces(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(page(1, BLOCKS * BLOCK))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    client = PreadRings("a test wants them")
    client.register(fd)
    ring = ring_of(client)
    assert client.any_memory
    # More pieces than the kernel takes in one call.
    pieces = [memoryview(bytearray(8)) for _ in range(4000)]
    ring.prepare(pieces, fd, 16, 1)
    ring.submit()
    assert wait_for_all(ring) == {1: 32000}
    assert b"".join(pieces) == page(1, BLOCKS * BLOCK)[16:32016]
    os.close(fd)


def test_a_settled_ring_of_system_calls_never_touches_the_memory_it_was_given(fd: int) -> None:
    client = PreadRings("a test wants them")
    client.register(fd)
    ring = ring_of(client)
    buffer = bytearray(BLOCK)
    ring.prepare([memoryview(buffer)], fd, 0, 1)
    ring.submit()
    assert ring.drain(0.0)
    assert ring.wait(1, soon_off_loop()) == []
    assert buffer == bytearray(BLOCK)


UNFIT: dict[str, Callable[[Ring], list[memoryview]]] = {
    "other memory": lambda _: [memoryview(bytearray(BLOCK))],
    "two pieces": lambda ring: [block(ring, 0), block(ring, 1)],
    "nothing": lambda ring: [ring.memory[:0]],
}


@pytest.mark.parametrize("views", UNFIT.values(), ids=UNFIT.keys())
def test_usrbio_takes_only_one_piece_of_its_own_memory(
    tmp_path: Path, views: Callable[[Ring], list[memoryview]]
) -> None:
    (tmp_path / "file").write_bytes(page(1, BLOCK))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    client = UsrbioRings(UsrbioStandIn(), "/mnt/3fs")
    client.register(fd)
    ring = ring_of(client)
    assert not client.any_memory
    with pytest.raises(OSError, match="memory") as caught:
        ring.prepare(views(ring), fd, 0, 1)
    assert caught.value.errno == errno.EINVAL
    ring.close()
    client.deregister(fd)
    os.close(fd)


def test_a_usrbio_ring_that_does_not_answer_settles_only_once_it_has(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(page(1, BLOCK))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    stand_in = UsrbioStandIn()
    client = UsrbioRings(stand_in, "/mnt/3fs")
    client.register(fd)
    ring = ring_of(client)
    stand_in.gate.clear()
    ring.prepare([block(ring, 0)], fd, 0, 1)
    ring.submit()
    assert ring.wait(1, time.monotonic() + 0.01) == []
    assert not ring.drain(time.monotonic() + 0.01)
    assert ring.pending == 1
    stand_in.gate.set()
    assert ring.drain(soon_off_loop())
    ring.close()
    client.deregister(fd)
    os.close(fd)


def test_a_closed_usrbio_ring_leaves_no_link_to_its_memory() -> None:
    stand_in = UsrbioStandIn()
    ring = ring_of(UsrbioRings(stand_in, "/mnt/3fs"))
    assert stand_in.iovecs == 1
    ring.close()
    assert stand_in.iovecs == 0


def test_a_mount_is_found_only_where_3fs_is_mounted() -> None:
    assert find_mount(UsrbioStandIn(), Path("/mnt/3fs/store")) is not None
    assert find_mount(UsrbioStandIn(), Path("/srv/store")) is None


def test_where_there_is_no_3fs_the_rings_say_what_they_are(tmp_path: Path) -> None:
    text = choose_rings(tmp_path).text
    assert text.startswith("rings over preadv and pwritev, because")
