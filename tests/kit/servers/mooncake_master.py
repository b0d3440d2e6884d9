"""A real Mooncake master on loopback, and a store on it, for tests of the Mooncake backend."""

import asyncio
import mmap
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import ObjectName, name_digest
from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from lockstep.storage_backends.mooncake.backend import MooncakeBackend
from lockstep.storage_backends.mooncake.client import MooncakeClient, MooncakeSettings, set_up
from lockstep.storage_backends.mooncake.names import GENERATIONS, key_of
from tests.kit.programs import program
from tests.kit.servers.ports import free_port
from tests.kit.servers.processes import stopped_process, until
from tests.kit.storage.calls import eventually, get, object_name, page, put, soon

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

SEGMENT_BYTES = 128 << 20
CLIENT_TTL_S = 2
LEASE_MS = 500


def needs_mooncake() -> None:
    """Skip the test with a reason if the Mooncake client cannot be loaded."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the extra mooncake")
    try:
        import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"needs the system's libibverbs1: {error}")


class Master:
    """A `mooncake_master` process that tests can kill, restart, pause and resume."""

    def __init__(self, *flags: str) -> None:
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        self._binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        self._port = free_port()
        self._flags = flags
        self.begin()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def begin(self) -> None:
        self._process = subprocess.Popen(
            [
                self._binary,
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self._port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}",
                f"--client_ttl={CLIENT_TTL_S}",
                f"--default_kv_lease_ttl={LEASE_MS}",
                "--enable_metric_reporting=false",
                "--logtostderr",
                *self._flags,
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        until(self._listens)

    def stopped(self) -> AbstractContextManager[None]:
        """Pause the master (SIGSTOP) during a `with` block."""
        return stopped_process(self._process.pid)

    def links(self) -> int:
        """Return the number of established connections to the master."""
        rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
        ends = [row.split()[2:4] for row in rows]
        # Count rows with the master's remote port and TCP state 01 (established).
        return sum(end.endswith(f":{self._port:04X}") and state == "01" for end, state in ends)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _listens(self) -> bool:
        assert self._process.poll() is None, "the master has ended"
        try:
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
        except OSError:
            return False
        return True


class LentClient(MooncakeClient):
    """A borrowed Mooncake client. `close` keeps the client connected and returns it to its pool."""

    def __init__(
        self,
        store: "MooncakeDistributedStore",
        settings: MooncakeSettings,
        back: "list[MooncakeDistributedStore]",
    ) -> None:
        super().__init__(store, settings)
        self._back = back

    def close(self) -> None:
        self.unregister()
        self._back.append(self._store)


Lent = TypeVar("Lent", bound=LentClient)


class MooncakeStore:
    """A Mooncake store: a master, a client whose memory holds the objects, and a pool of clients.

    Backends borrow clients from the pool, because a client needs seconds to disconnect.
    """

    def __init__(self, *flags: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.master = Master(*flags)
        self._idle: list[MooncakeDistributedStore] = []
        self._made: list[MooncakeDistributedStore] = []
        try:
            self.owner = self._make(segment_bytes)
            if not segment_bytes:
                # Let tests borrow this client, because it stores no objects. One client fewer is then
                # created, and closing the store is faster.
                self._idle.append(self.owner)
        except BaseException:
            self.master.kill()
            raise

    def settings(self, segment_bytes: int = 0) -> MooncakeSettings:
        return MooncakeSettings(master=self.master.address, segment_bytes=segment_bytes)

    def backend(self) -> MooncakeBackend:
        return MooncakeBackend(self.settings(), self.lend)

    def content(self, name: ObjectName) -> bytes:
        raw = self.owner.get(self.key(name))
        assert raw
        return raw

    def overwrite(self, key: str, content: bytes) -> None:
        self.owner.remove(key, True)
        assert self.owner.put(key, content) == 0

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        content = bytearray(self.content(name))
        content[HEADER_BYTES + at] ^= 8
        self.overwrite(self.key(name), bytes(content))

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.overwrite(self.key(other), self.content(name))

    def key(self, name: ObjectName) -> str:
        """Return the key of an object's newest generation, or of generation 0 for a missing object."""
        digest = name_digest(name)
        assert digest is not None
        keys = [key_of(digest, generation) for generation in range(GENERATIONS)]
        return next((key for key in reversed(keys) if self.owner.is_exist(key) == 1), keys[0])

    def clear(self) -> None:
        self.owner.remove_all(True)

    def link_often(self, links: int = 12) -> None:
        """Make the next borrowed client open at least `links` connections to the master.

        When the master has died, a call over an open connection fails at once. Each failure uses up one
        connection. A call without an open connection retries for four seconds.
        """
        client = self.lend(self.settings())
        before = self.master.links()
        with self.master.stopped():
            # Make concurrent calls. Each call to the paused master occupies one connection, so that the
            # client opens more connections.
            calls = [
                threading.Thread(target=client.exist, args=[["any"]]) for _ in range(before + links)
            ]
            for each in calls:
                each.start()
            until(lambda: self.master.links() >= links)
        for each in calls:
            each.join(30)
        client.close()

    def outlast_leases(self) -> None:
        """Wait until every lease that the master has granted has expired."""
        assert self.owner.put("read last", b"x") == 0
        assert self.owner.get("read last") == b"x"
        # Retry the removal, because the master refuses it until the object's lease has expired.
        until(lambda: self.owner.remove("read last") == 0)

    def close(self) -> None:
        leaving = [threading.Thread(target=each.close) for each in self._made]
        for each in leaving:
            each.start()
        for each in leaving:
            each.join(60)
        self.master.kill()

    def lend(self, settings: MooncakeSettings) -> MooncakeClient:
        """Borrow a client from the pool. Closing the client returns it to the pool."""
        return self.lend_as(LentClient, settings)

    def lend_as(self, kind: type[Lent], settings: MooncakeSettings) -> Lent:
        store = self._idle.pop() if self._idle else self._make(0)
        return kind(store, settings, self._idle)

    def _make(self, segment_bytes: int) -> "MooncakeDistributedStore":
        store = set_up(self.settings(segment_bytes))
        self._made.append(store)
        return store


@contextmanager
def a_store(*flags: str, segment_bytes: int = SEGMENT_BYTES) -> Generator[MooncakeStore]:
    """Run a separate Mooncake store. This is slow, because its clients need seconds to disconnect."""
    needs_mooncake()
    store = MooncakeStore(*flags, segment_bytes=segment_bytes)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(scope="module")
def mooncake_store() -> Generator[MooncakeStore]:
    """One Mooncake store for all tests of a module. Each test must leave the store's master running."""
    with a_store() as store:
        yield store


@pytest.fixture
def shared(mooncake_store: MooncakeStore) -> MooncakeStore:
    """The Mooncake store that a module's tests share, emptied for the current test."""
    mooncake_store.clear()
    return mooncake_store


@contextmanager
def process(
    what: str, store: MooncakeStore, *arguments: str, **environment: str
) -> Generator["subprocess.Popen[str]"]:
    """Run `mooncake_process` with first argument `what` on the store; yield the process once ready."""
    with subprocess.Popen(
        program("tests.kit.servers.mooncake_process", what, store.master.address, *arguments),
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        try:
            assert line_of(child) == "ready"
            yield child
        finally:
            child.kill()


@contextmanager
def brought_back(folder: Path) -> Generator[MooncakeStore]:
    """Run a store that has recovered two pages from disk: page 1, and page 0 with page 1's content."""
    with _on_disk(folder):
        pass
    with _on_disk(folder) as store:
        yield store


@contextmanager
def _on_disk(folder: Path) -> Generator[MooncakeStore]:
    environment = {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "2",
    }
    with (
        a_store("--enable_offload=true", segment_bytes=0) as store,
        process("disk", store, str(folder), **environment),
    ):
        yield store


class Begun:
    """Counts the reads and existence checks that threads have started on Mooncake clients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun = threading.Semaphore(0)
        for name in ("reading", "exist"):
            monkeypatch.setattr(MooncakeClient, name, self._telling(getattr(MooncakeClient, name)))

    def _telling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*arguments: Any) -> Any:
            self._begun.release()
            return call(*arguments)

        return tell

    def forget(self) -> None:
        while self._begun.acquire(blocking=False):
            pass

    async def wait(self, threads: int = 1) -> None:
        """Wait until this many reads or existence checks have started."""
        for _ in range(threads):
            assert await asyncio.to_thread(self._begun.acquire, timeout=60)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


def line_of(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def pool(nbytes: int) -> memoryview:
    """Return page-aligned memory like that of the host pool."""
    return memoryview(mmap.mmap(-1, nbytes))


async def usable(backend: StorageBackend, number: int) -> None:
    async def takes_one() -> bool:
        await backend.remove([object_name(number)], deadline=soon())
        return await put(backend, object_name(number), page(number)) is WriteOutcome.OK

    await eventually(takes_one)
    assert await get(backend, object_name(number)) == (ReadOutcome.OK, page(number))
