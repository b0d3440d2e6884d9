"""Blocking calls to an asynchronous store: which of them wait, their timeouts, and their errors."""

import asyncio
import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.integrations import blocking_store
from lockstep.integrations.blocking_store import BlockingStore
from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend
from lockstep.storage_backends.memory import MemoryBackend, Shelf


class Hanging(MemoryBackend):
    """A store that ignores deadlines: it answers when the test releases it."""

    def __init__(self) -> None:
        super().__init__(Shelf())
        self.called = threading.Event()
        self.let_go = threading.Event()
        self.opens = True

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        if not self.opens:
            await self._hang()
        await super().open(memory)

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        await self._hang()
        return [True] * len(names)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        await self._hang()
        return [ReadOutcome.TIMED_OUT] * len(reads)

    async def _hang(self) -> None:
        self.called.set()
        await asyncio.get_running_loop().run_in_executor(None, self.let_go.wait)


@pytest.fixture
def backend() -> Iterator[Hanging]:
    backend = Hanging()
    yield backend
    backend.let_go.set()


@pytest.fixture
def store(backend: Hanging) -> Iterator[BlockingStore]:
    with made_over(backend) as store:
        store.open([], 10.0)
        yield store
        backend.let_go.set()
        store.close()


@contextmanager
def made_over(backend: StorageBackend) -> Generator[BlockingStore]:
    with (
        patch.object(blocking_store, "make_backend", return_value=backend),
        patch.object(blocking_store, "LATE_S", 0.05),
    ):
        yield BlockingStore("memory://", "an engine")


def test_a_lookup_that_hangs_is_left(store: BlockingStore) -> None:
    by = time.monotonic()

    with pytest.raises(StorageError, match="does not respond"):
        store.call(lambda backend: backend.exists([], deadline=by), by, leaves=True)


def test_a_read_is_waited_for_as_long_as_it_may_touch_its_buffers(
    store: BlockingStore, backend: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    by = time.monotonic()
    answers: list[list[ReadOutcome]] = []
    caller = threading.Thread(
        target=lambda: answers.append(store.call(lambda backend: backend.read([], deadline=by), by))
    )

    with caplog.at_level(logging.WARNING, "lockstep.integrations"):
        caller.start()
        caller.join(0.5)
        still_waits = caller.is_alive()
        backend.let_go.set()
        caller.join(10)

    assert still_waits
    assert answers == [[]]
    assert [record.message for record in caplog.records if "after its deadline" in record.message]


def test_a_store_that_does_not_open_in_time_is_named(backend: Hanging) -> None:
    backend.opens = False

    with (
        made_over(backend) as store,
        pytest.raises(ConfigError, match=r"memory:// did not open within 0\.05 s"),
    ):
        store.open([], 0.05)
    backend.let_go.set()
    store.close()


def test_what_keeps_a_store_from_opening_is_told_as_it_is() -> None:
    class Refusing(MemoryBackend):
        async def open(self, memory: Sequence[memoryview] = ()) -> None:
            raise ConfigError("no such bucket")

    with made_over(Refusing(Shelf())) as store, pytest.raises(ConfigError, match="no such bucket"):
        store.open([], 10.0)


def test_close_waits_for_calls_that_run(store: BlockingStore, backend: Hanging) -> None:
    by = time.monotonic() + 10
    answers: list[list[ReadOutcome]] = []
    caller = threading.Thread(
        target=lambda: answers.append(store.call(lambda backend: backend.read([], deadline=by), by))
    )
    caller.start()
    assert backend.called.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()

    closer.join(0.2)
    waits = closer.is_alive()
    backend.let_go.set()
    closer.join(10)
    caller.join(10)

    assert waits
    assert answers == [[]]


def test_a_store_that_was_never_opened_can_be_closed_and_answers_nothing() -> None:
    store = BlockingStore("memory://", "an engine")
    store.close()

    with pytest.raises(StorageError, match="not open"):
        store.call(lambda backend: backend.exists([], deadline=0.0), 0.0)
