"""Helpers for tests of `memory://`: backends that share one set of objects in memory."""

from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from tests.kit.storage.calls import digest_of


class MemoryStore:
    def __init__(self) -> None:
        self.shelf = Shelf()

    def backend(self) -> MemoryBackend:
        return MemoryBackend(self.shelf)

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        header, payload = self.shelf.objects[digest_of(name)]
        spoilt = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        self.shelf.objects[digest_of(name)] = (header, spoilt)

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.shelf.objects[digest_of(other)] = self.shelf.objects[digest_of(name)]
