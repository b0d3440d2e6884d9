"""Writers of one Mooncake object with different columns, with their steps interleaved explicitly."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.error_log import ErrorLog
from lockstep.storage_backends.mooncake.client import MooncakeClient
from lockstep.storage_backends.mooncake.memory import RegisteredMemory
from lockstep.storage_backends.mooncake.names import WantedObject, key_of
from lockstep.storage_backends.mooncake.pieces import Code
from lockstep.storage_backends.mooncake.reads import ObjectReader
from lockstep.storage_backends.mooncake.writes import New, ObjectWriter
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.servers.mooncake_master import MooncakeStore
from tests.kit.storage.calls import EVERY, columns, digest_of, full_page, object_name, soon_off_loop

NAME = object_name(1)


class Engine(NamedTuple):
    """One process's client, reader and writer of a Mooncake Store, all called in the test's thread."""

    client: MooncakeClient
    reader: ObjectReader
    writer: ObjectWriter

    @classmethod
    def of(cls, store: MooncakeStore) -> "Engine":
        client = store.lend(store.settings())
        memory = RegisteredMemory(client, [])
        reader = ObjectReader(client, memory)
        return cls(client, reader, ObjectWriter(client, memory, reader, ErrorLog("it")))

    def put(self, present: int, author: int = 1) -> WriteOutcome:
        want = wanted(present, full_page(present, author))
        (outcome,) = self.writer.write([New(NAME, want)], Stop(soon_off_loop()))
        return outcome

    def get(self, present: int) -> tuple[ReadOutcome, bytearray]:
        buffer = bytearray(columns(present).nbytes)
        (outcome,) = self.reader.read([wanted(present, buffer)], Stop(soon_off_loop()))
        return outcome, buffer


def wanted(present: int, content: bytearray) -> WantedObject:
    return WantedObject(digest_of(NAME), [memoryview(content)], columns(present))


def meanwhile(by: Engine, others: Sequence[int]) -> Callable[[], None]:
    """Return a function whose first call writes the object once for each column mask in `others`."""
    waiting = list(others)

    def write() -> None:
        while waiting:
            assert by.put(waiting.pop(0)) is WriteOutcome.OK

    return write


def late(
    engine: Engine, happens: Callable[[], None]
) -> Callable[[list[str], list[int]], list[int]]:
    """Return the client's `begin`, wrapped so that it calls `happens` first."""
    begin = engine.client.begin

    def begin_late(keys: list[str], sizes: list[int]) -> list[int]:
        happens()
        return begin(keys, sizes)

    return begin_late


class TestOvertakenWriters:
    """Others replace or remove an object after a writer has checked it, and before its write begins."""

    @pytest.mark.parametrize(
        ("standing", "others"),
        [((), (0b001, 0b010)), ((0,), (0b001, 0b010)), ((), (0, 0b001, 0b010))],
        ids=str,
    )
    def test_s8_the_columns_of_a_writer_that_was_overtaken_are_added_to_those_of_the_others(
        self,
        shared: MooncakeStore,
        monkeypatch: pytest.MonkeyPatch,
        standing: Sequence[int],
        others: Sequence[int],
    ) -> None:
        slow, quick = Engine.of(shared), Engine.of(shared)
        for present in standing:
            quick.put(present)
        monkeypatch.setattr(slow.client, "begin", late(slow, meanwhile(quick, others)))
        assert slow.put(0b100) is WriteOutcome.OK
        assert [quick.get(requested) for requested in range(EVERY + 1)] == [
            (ReadOutcome.OK, full_page(requested)) for requested in range(EVERY + 1)
        ]
        slow.client.close()
        quick.client.close()

    def test_s6_a_writer_that_was_overtaken_leaves_the_object_as_the_others_wrote_it(
        self, shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow, quick = Engine.of(shared), Engine.of(shared)
        monkeypatch.setattr(slow.client, "begin", late(slow, meanwhile(quick, (0b001, 0b010))))
        assert slow.put(0b010, author=2) is WriteOutcome.PRESENT
        assert [quick.get(requested) for requested in range(0b011 + 1)] == [
            (ReadOutcome.OK, full_page(requested)) for requested in range(0b011 + 1)
        ]
        slow.client.close()
        quick.client.close()

    def test_where_the_master_does_not_say_whether_others_were_quicker_nothing_is_written(
        self, shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine.of(shared)

        def silent(keys: list[str]) -> list[int]:
            return [int(Code.NO_MASTER)] * len(keys)

        with monkeypatch.context() as patch:
            patch.setattr(engine.client, "presence", silent)
            assert engine.put(0b001) is WriteOutcome.FAILED
        assert engine.get(0)[0] is ReadOutcome.MISSING
        assert engine.put(0b001) is WriteOutcome.OK
        engine.client.close()


class SlowLook:
    """An existence check in reverse order that calls `happens` after each key but the first `after`."""

    def __init__(self, engine: Engine, after: int, happens: Callable[[], None]) -> None:
        self._presence = engine.client.presence
        self._after = after
        self._happens = happens
        self.queried_keys: list[str] = []

    def __call__(self, keys: list[str]) -> list[int]:
        codes: list[int] = []
        for key in reversed(keys):
            codes.insert(0, self._presence([key])[0])
            self.queried_keys.append(key)
            if len(self.queried_keys) > self._after:
                self._happens()
        return codes


class TestReadersOfWhatIsReplaced:
    @pytest.mark.parametrize("question", range(4))
    def test_s8_a_reader_finds_an_object_that_is_replaced_between_any_two_of_its_steps(
        self, shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch, question: int
    ) -> None:
        quick, other = Engine.of(shared), Engine.of(shared)
        quick.put(0)
        quick.put(0b001)
        slowly = SlowLook(other, question, meanwhile(quick, (0b010,)))

        monkeypatch.setattr(other.client, "presence", slowly)
        assert other.get(0b001) == (ReadOutcome.OK, full_page(0b001))
        assert slowly.queried_keys[0] == key_of(digest_of(NAME), 1)
        other.client.close()
        quick.client.close()
