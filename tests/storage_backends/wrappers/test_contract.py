"""Every wrapper keeps the promises of the store behind it, whichever store that is.

A wrapper does not know its store: what it breaks shows in memory. All of them together before every
other store show that they need nothing which only memory has.
"""

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


@pytest.fixture(
    params=[
        *(pytest.param((wrapper, "memory"), id=f"{wrapper}-memory") for wrapper in WRAPPERS),
        *(
            pytest.param(
                ("all", store), id=f"all-{store}", marks=() if store == "file" else pytest.mark.slow
            )
            for store in STORES
            if store != "memory"
        ),
    ]
)
def store(request: pytest.FixtureRequest) -> StoreUnderTest:
    wrapper, name = request.param
    return WrappedStore(make_store(name, request), WRAPPERS[wrapper])


class TestWrapperContract(StorageContract):
    """The suite, behind the wrappers."""
