"""Prefetches that read only as many pages as host memory has room for."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.ranks.protocol.orders import Need
from lockstep.ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from lockstep.ranks.replica.core.replica_parts import ReplicaParts
from lockstep.ranks.replica.operations.kinds import Prefetch
from lockstep.ranks.replica.prefetch.lookups import LookupPlanner
from lockstep.ranks.replica.replica import Replica
from lockstep.ranks.replica.tree.node import HOST, TreeIdentity

PAGES = 24


def replica_with_room(window: int, host_pages: int, slots: int) -> Replica:
    """Return a replica with limited host pages for a window and limited host slots for a state."""
    components = tuple(
        ComponentSettings(kind=kind, pool=kind, device_pages=4, host_pages=pages, every_pages=every)
        for kind, pages, every in (
            (SlidingWindow.kind, host_pages, window),
            (Recurrent.kind, slots, 1),
        )
    )
    config = ReplicaConfig(
        page_tokens=1,
        device_pages=4,
        host_pages=4 * PAGES,
        components=components,
        has_store=True,
        model_digest=b"model",
    )
    return Replica(config)


@given(
    window=st.integers(1, 8),
    room=st.integers(1, 8),
    slots=st.integers(0, 2),
    floor=st.integers(0, 6),
    length=st.integers(0, PAGES),
    held=st.sets(st.integers(0, PAGES + 6)),
    checkpoints=st.sets(st.integers(0, PAGES + 6)),
)
def test_the_longest_length_that_fits_is_the_one_that_trying_each_finds(
    *,
    window: int,
    room: int,
    slots: int,
    floor: int,
    length: int,
    held: set[int],
    checkpoints: set[int],
) -> None:
    replica = replica_with_room(window, room, slots)
    prefixes = replica.prefixes
    needs = [Need("kv", floor, ())]
    for component, there in zip(prefixes.components[1:], (held, checkpoints), strict=True):
        first = component.needed_from(floor + 1)
        needs.append(Need(component.pool, first, (), component.span, frozenset(there)))
    operation = Prefetch(
        request="r",
        tokens=b"",
        waits_since_ms=0,
        anchor=prefixes.root(TreeIdentity("")),
        floor=floor,
        components=prefixes.components,
        needs=tuple(needs),
    )

    def fits(pages: int) -> bool:
        end = floor + pages
        return all(
            sum(p not in need.on_host for p in range(max(need.first, each.needed_from(end)), end))
            <= prefixes.allocator.available(HOST, each.index)
            for each, need in zip(prefixes.components[1:], needs[1:], strict=True)
        )

    expected = next(pages for pages in range(length, -1, -1) if not pages or fits(pages))
    assert (
        LookupPlanner(ReplicaParts(replica.config), prefixes, replica.store).room_for(
            operation, length
        )
        == expected
    )
