"""Groups that are read from: what was seen of one is counted also when it was let go of."""

from typing import cast

import pytest

from lockstep.page_format.page_layout import Column, PageLayout, ShardPlace
from lockstep.ranks.executor.inflight_bytes import InflightBytes
from lockstep.ranks.executor.late_calls import LateCallsLog
from lockstep.ranks.executor.sources import SOURCES_MAX, Sources
from lockstep.ranks.executor.storage_loop import StorageLoop
from lockstep.storage_backends.base import Counters
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.wrappers.metrics import CallLog
from tests.kit.ranks.executor_parts import PATIENCE_S
from tests.kit.ranks.page_servers import objects_of


class IdleLoop:
    """The loop of a source that has seen one corrupt page, and has nothing to do."""

    def start(self, timeout_s: float) -> None:
        """Open at once."""

    def stop(self, timeout_s: float) -> None:
        """End at once."""

    def submit(self, orders: object) -> bool:
        return True

    def trouble(self) -> str | None:
        return None

    def is_idle(self) -> bool:
        return True

    def join(self, timeout_s: float) -> bool:
        return True

    def counters(self) -> Counters:
        return Counters(reads_corrupt=1)


@pytest.mark.parametrize("groups", [1, SOURCES_MAX, 3 * SOURCES_MAX])
def test_what_was_seen_of_a_group_is_counted_after_others_have_its_place(groups: int) -> None:
    sources = Sources(lambda _: cast("StorageLoop", IdleLoop()), 1.0)
    assert all(sources.submit(f"peer://there:{number}", ()) for number in range(groups))
    assert sources.counters().reads_corrupt == groups
    sources.stop()
    assert sources.join(1.0)
    assert sources.counters().reads_corrupt == groups


def test_a_group_of_which_something_was_asked_is_not_idle_before_its_thread_has_seen_that() -> None:
    """Others would have its place, and what was asked be missing."""
    layout = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=2, elements=4),))
    objects = objects_of(layout, ShardPlace.of(0, 1), pages=1)
    loop = StorageLoop(
        lambda: MemoryBackend(Shelf()),
        objects,
        lambda _: None,
        room=InflightBytes(1),
        late=LateCallsLog(),
        calls=CallLog(),
    )
    was_idle = loop.is_idle()
    loop.submit([])
    asked = loop.is_idle()
    loop.open(PATIENCE_S)
    loop.stop(PATIENCE_S)

    assert loop.join(PATIENCE_S)
    assert (was_idle, asked, loop.is_idle()) == (True, False, True)
