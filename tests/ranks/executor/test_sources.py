"""Connections to the groups that a rank reads pages from, and when a connection counts as idle."""

from typing import cast

from lockstep.page_format.page_layout import Column, PageLayout, ShardPlace
from lockstep.ranks.executor.inflight_bytes import InflightBytes
from lockstep.ranks.executor.late_calls import LateCallsLog
from lockstep.ranks.executor.sources import SOURCES_MAX, Sources
from lockstep.ranks.executor.storage_loop import StorageLoop
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.wrappers.metrics import CallLog
from tests.kit.ranks.executor_parts import PATIENCE_S
from tests.kit.ranks.page_servers import objects_of


class IdleLoop:
    """A storage loop without work, which stands in for one peer connection."""

    def start(self, timeout_s: float, failed: object) -> None:
        """Open at once, without a thread."""

    def stop(self, timeout_s: float, *, opening: bool) -> None:
        """Stop at once, without a thread."""

    def submit(self, orders: object) -> bool:
        return True

    def trouble(self) -> str | None:
        return None

    def is_opening(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return True

    def join(self, timeout_s: float) -> bool:
        return True


def test_more_groups_than_may_be_connected_are_read_from_one_after_another() -> None:
    sources = Sources(lambda _: cast("StorageLoop", IdleLoop()), 1.0)
    assert all(sources.loop(f"peer://there:{number}") for number in range(2 * SOURCES_MAX))
    sources.stop()
    assert sources.join(1.0)


def test_a_group_of_which_something_was_asked_is_not_idle_before_its_thread_has_seen_that() -> None:
    """A loop with submitted orders is not idle, so that its connection is kept until the orders end."""
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
    idle_after_submit = loop.is_idle()
    loop.open(PATIENCE_S)
    loop.stop(PATIENCE_S)

    assert loop.join(PATIENCE_S)
    assert (was_idle, idle_after_submit, loop.is_idle()) == (True, False, True)
