"""Every wrapper keeps the contract of the store behind it, alone and combined with the others."""

from dataclasses import dataclass

import pytest

from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.registry import WrapBackend
from lockstep.storage_backends.wrappers import breaker, fault, metrics
from tests.kit.storage.contract import StorageContract
from tests.kit.storage.layers import wrapped
from tests.kit.storage.memory import MemoryStore

Wrapping = tuple[WrapBackend, str]
BREAKER: Wrapping = (breaker.wrap, "?breaker.calls=3")
FAULT: Wrapping = (fault.wrap, "?fault.delay=0.5&fault.delay_ms=1")
METRICS: Wrapping = (metrics.wrap, "")


@dataclass
class WrappedStore:
    """A store in memory whose backends are wrapped."""

    store: MemoryStore
    wrappers: list[Wrapping]

    def backend(self) -> StorageBackend:
        backend: StorageBackend = self.store.backend()
        for wrap, options in self.wrappers:
            backend = wrapped(wrap, options, backend)
        return backend

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        self.store.spoil(name, at)

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.store.pass_off(name, other)


@pytest.fixture(
    params=[[BREAKER], [FAULT], [METRICS], [FAULT, BREAKER, METRICS]],
    ids=["breaker", "fault", "metrics", "all"],
)
def store(request: pytest.FixtureRequest) -> WrappedStore:
    return WrappedStore(MemoryStore(), request.param)


class TestWrapperContract(StorageContract):
    """The storage contract, through the wrappers."""
