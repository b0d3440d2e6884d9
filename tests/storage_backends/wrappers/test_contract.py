"""Every wrapper keeps the promises of the store behind it, whichever store that is."""

from dataclasses import dataclass

import pytest

from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.registry import WrapBackend
from lockstep.storage_backends.wrappers import breaker, fault, limit, metrics, retry
from tests.kit.storage.by_name import (
    STORES,
    make_store,
)
from tests.kit.storage.calls import StoreUnderTest
from tests.kit.storage.contract import StorageContract
from tests.kit.storage.layers import wrapped

WRAPPERS: dict[str, list[tuple[WrapBackend, str]]] = {
    "breaker": [(breaker.wrap, "?breaker.calls=3")],
    "fault": [(fault.wrap, "?fault.delay=0.5&fault.delay_ms=1")],
    "limit": [(limit.wrap, "?limit.calls=2&limit.bytes=1000000")],
    "metrics": [(metrics.wrap, "")],
    "retry": [(retry.wrap, "?retry.base_ms=1")],
    "all": [
        (retry.wrap, "?retry.base_ms=1"),
        (fault.wrap, "?fault.delay=0.5&fault.delay_ms=1"),
        (breaker.wrap, ""),
        (limit.wrap, "?limit.calls=4"),
        (metrics.wrap, ""),
    ],
}


@dataclass
class WrappedStore:
    """A store whose backends stand behind wrappers."""

    store: StoreUnderTest
    wrappers: list[tuple[WrapBackend, str]]

    def backend(self) -> StorageBackend:
        backend = self.store.backend()
        for wrap, options in self.wrappers:
            backend = wrapped(wrap, options, backend)
        return backend

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        self.store.spoil(name, at)

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.store.pass_off(name, other)


def is_quick(wrapper: str, store: str) -> bool:
    """A wrapper does not know its store: what it breaks shows in memory, and the rest is slow."""
    return store == "memory" or (wrapper, store) == ("all", "file")


@pytest.fixture(
    params=[
        pytest.param(
            (wrapper, store),
            id=f"{wrapper}-{store}",
            marks=() if is_quick(wrapper, store) else pytest.mark.slow,
        )
        for store in STORES
        for wrapper in WRAPPERS
    ]
)
def store(request: pytest.FixtureRequest) -> StoreUnderTest:
    wrapper, name = request.param
    return WrappedStore(make_store(name, request), WRAPPERS[wrapper])


class TestWrapperContract(StorageContract):
    """The suite, under every wrapper and before every store."""
