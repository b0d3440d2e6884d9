"""Groups that are read from: what was seen of one is counted also when it was let go of."""

from typing import cast

import pytest

from lockstep.ranks.executor.sources import SOURCES_MAX, Sources
from lockstep.ranks.executor.storage_loop import StorageLoop
from lockstep.storage_backends.base import Counters


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
