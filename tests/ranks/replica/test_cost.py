"""The cost of a step or command is proportional to its changes (rule R15), counted in calls."""

import pytest

from lockstep.ranks.protocol.config import WritePolicy
from tests.kit.counted_calls import calls
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn


def prompt(first: int, pages: int) -> list[int]:
    return [first, *range(100, 99 + pages * PAGE_TOKENS)]


def step(ranks: RanksInTurn) -> None:
    """Run one step without the test kit's checks, because they visit the whole tree."""
    (cache,) = ranks.caches
    cache.open_round()
    cache.close_round()


def with_pins(count: int, host_pages: int) -> RanksInTurn:
    """Return a rank with `count` pinned prompts on the device, with or without host memory."""
    ranks = RanksInTurn(
        1,
        store=False,
        device_pages=2048,
        host_pages=host_pages,
        write_policy=WritePolicy.WRITE_BACK,
    )
    ranks.publish("r", prompt(1, pages=2))
    for number in range(count):
        assert ranks.caches[0].pin(f"p{number}", prompt(1, pages=2), ttl_s=1000.0)
    step(ranks)
    return ranks


@pytest.mark.parametrize("host_pages", [0, 2048])
def test_a_step_looks_at_no_pin_that_nothing_was_copied_for(host_pages: int) -> None:
    few, many = (with_pins(count, host_pages) for count in (1, 300))

    assert calls(lambda: step(few)) == calls(lambda: step(many))


def on_its_way_to_the_host(nodes: int) -> RanksInTurn:
    ranks = RanksInTurn(
        1,
        store=False,
        device_pages=4 * nodes,
        host_pages=2 * nodes,
        write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
        selective_hits=1,
    )
    (cache,) = ranks.caches
    tokens = prompt(1, pages=nodes)
    cache.load_back("r", [], reserve_tokens=len(tokens))
    cache.insert("r", tokens)
    cache.release("r")
    for page in range(1, nodes):
        # This prompt leaves the first prompt's path in the middle, which splits the node there.
        other = [*tokens[: page * PAGE_TOKENS], *range(PAGE_TOKENS)]
        cache.load_back("other", [], reserve_tokens=len(other))
        cache.insert("other", other)
        cache.release("other")
    cache.load_back("hit", tokens)
    assert cache.inspection.prefixes.tree.node_count == 2 * nodes - 1
    assert len(cache.inspection.in_flight) == 1
    return ranks


def test_a_hit_of_a_path_that_is_being_backed_up_costs_in_proportion_to_its_nodes() -> None:
    nodes = 64
    short, long = (on_its_way_to_the_host(count) for count in (nodes, 4 * nodes))
    tokens = prompt(1, pages=4 * nodes)

    once = calls(lambda: short.caches[0].load_back("again", tokens[: nodes * PAGE_TOKENS]))
    four_times = calls(lambda: long.caches[0].load_back("again", tokens))

    assert four_times < 5 * once


def locked(nodes: int) -> RanksInTurn:
    ranks = RanksInTurn(1, store=False, device_pages=4 * nodes, host_pages=0)
    ranks.publish("r", prompt(1, pages=nodes))
    for page in range(1, nodes):
        ranks.publish("other", [*prompt(1, pages=nodes)[: page * PAGE_TOKENS], *range(PAGE_TOKENS)])
    (cache,) = ranks.caches
    cache.load_back("first", prompt(1, pages=nodes))
    assert cache.inspection.prefixes.tree.node_count == 2 * nodes - 1
    return ranks


def test_a_lock_of_what_is_locked_already_costs_the_same_however_long_its_path_is() -> None:
    short, long = locked(16), locked(64)

    of_16 = calls(lambda: short.caches[0].load_back("second", prompt(1, pages=16)))
    of_64 = calls(lambda: long.caches[0].load_back("second", prompt(1, pages=64)))

    assert of_16 == of_64
