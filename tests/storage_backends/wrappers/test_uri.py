"""Wrappers in a store's URI: their options, and how each mistake is named in the error."""

import pytest

from lockstep.errors import ConfigError
from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.file.backend import FileBackend
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.wrappers.base import Wrapper
from lockstep.storage_backends.wrappers.breaker import BreakerBackend
from lockstep.storage_backends.wrappers.fault import FaultBackend
from lockstep.storage_backends.wrappers.metrics import MetricsBackend


def kinds(uri: str) -> list[type[StorageBackend]]:
    """Return the types of a store's wrappers, outermost first, and then of the store."""
    backend = make_backend(uri)
    found = [type(backend)]
    while isinstance(backend, Wrapper):
        backend = backend.behind
        found.append(type(backend))
    return found


def test_wrappers_stand_before_the_store_in_the_order_of_their_names() -> None:
    assert kinds("fault+breaker+file:///x?breaker.calls=3&fault.seed=7") == [
        FaultBackend,
        BreakerBackend,
        FileBackend,
    ]
    assert kinds("metrics+breaker+fault+memory://") == [
        MetricsBackend,
        BreakerBackend,
        FaultBackend,
        MemoryBackend,
    ]


def test_options_of_wrappers_and_of_the_store_stand_side_by_side() -> None:
    make_backend(
        "breaker+fault+file:///x?threads=2&breaker.calls=2&breaker.cool_down_s=0.5&fault.seed=1"
        "&fault.delay_ms=3&fault.flip=0.25&fault.lost=1&durability=data"
    )


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("slow+memory://", "unknown wrapper 'slow'; known: breaker, fault, metrics"),
        ("fault+fault+memory://", "wrapper 'fault' is named twice"),
        ("memory://?breaker.calls=3", "'breaker.calls'; it needs breaker+ before the scheme"),
        ("fault+memory://?breaker.calls=3", "it needs breaker+ before the scheme"),
        ("breaker+memory://?calls=3", "there is no option 'calls'; known: none"),
        ("breaker+memory://?breaker.calls=0", "breaker: calls is '0', must be at least 1"),
        ("breaker+memory://?breaker.call=3", "breaker: there is no option 'call'; known: calls,"),
        ("breaker+memory://?breaker.cool_down_s=nan", "must be at least 0.001"),
        ("metrics+memory://?metrics.x=1", "metrics: there is no option 'x'; known: none"),
        ("fault+memory://?fault.flips=0.1", "fault: there is no option 'flips'; known: delay,"),
        ("fault+memory://?fault.flip=2", "fault: flip is '2', must be at most 1"),
        ("fault+memory://?fault.flip=0.7&fault.error=0.7", "add up to more than 1"),
    ],
)
def test_a_wrong_wrapper_or_option_is_refused_by_name(uri: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_backend(uri)
    assert complaint in str(raised.value)
    assert f"store '{uri}'" in str(raised.value)
