"""Write policies, eviction policies, pins, quotas and TTLs."""

from collections.abc import Sequence

import pytest

from lockstep.errors import ConfigError, UsageError
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.answers import Admission, Wait
from lockstep.ranks.protocol.config import (
    ANY_NAMESPACE,
    Bounds,
    Eviction,
    NamespaceLimit,
    WritePolicy,
)
from lockstep.ranks.protocol.eviction_policies import Graded, register_eviction_policy
from lockstep.ranks.protocol.orders import CopyToHost
from lockstep.ranks.replica.tree.node import DEVICE
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn


def prompt(first: int, pages: int = 2) -> list[int]:
    """Return the tokens of some pages, and one more token, which is always computed."""
    return [first, *range(100, 100 + pages * PAGE_TOKENS)]


def serve(
    ranks: RanksInTurn, name: str, tokens: Sequence[int], namespace: str = "", priority: int = 0
) -> Admission:
    admission = ranks.every(
        lambda cache: cache.load_back(
            name, tokens[:-1], namespace, reserve_tokens=len(tokens), priority=priority
        )
    )
    assert isinstance(admission, Admission)
    ranks.settle()
    ranks.every(lambda cache: cache.insert(name, tokens))
    ranks.every(lambda cache: cache.release(name))
    ranks.settle()
    return admission


def admit(ranks: RanksInTurn, name: str, pages: int, *, tries: int) -> None:
    """Try up to `tries` times to admit a request of `pages` pages; let all I/O end between tries."""
    for _ in range(tries):
        answer = ranks.every(
            lambda cache: cache.load_back(name, [], reserve_tokens=pages * PAGE_TOKENS)
        )
        ranks.settle()
        if isinstance(answer, Admission):
            return
    raise AssertionError("a request that fits the device is not admitted to an idle group")


def cached(ranks: RanksInTurn, tokens: Sequence[int], namespace: str = "") -> tuple[int, int]:
    found = ranks.every(lambda cache: cache.match(tokens, namespace))
    return found.device_tokens // PAGE_TOKENS, found.host_tokens // PAGE_TOKENS


def host_pages(ranks: RanksInTurn) -> int:
    return ranks.every(lambda cache: cache.inspection.prefixes.allocator.tree_pages[1][0])


@pytest.mark.parametrize(
    ("eviction", "leaves"),
    [(Eviction.LRU, 1), (Eviction.LFU, 2), (Eviction.SLRU, 2), (Eviction.PRIORITY, 3)],
)
def test_the_policy_says_which_prompt_leaves_a_full_device(eviction: Eviction, leaves: int) -> None:
    """Each policy evicts the prompt that it ranks lowest from a full device.

    Prompt 1 had a hit but is oldest, prompt 2 has the highest priority, and prompt 3 is newest.
    """
    ranks = RanksInTurn(2, device_pages=7, host_pages=0, store=False, eviction=eviction)
    serve(ranks, "a", prompt(1), priority=1)
    serve(ranks, "a again", prompt(1), priority=1)
    serve(ranks, "b", prompt(2), priority=2)
    serve(ranks, "c", prompt(3))

    ranks.every(lambda cache: cache.load_back("d", [], reserve_tokens=3 * PAGE_TOKENS))

    left = [first for first in (1, 2, 3) if cached(ranks, prompt(first)) == (0, 0)]
    assert left == [leaves]


@pytest.mark.parametrize("write_policy", WritePolicy)
def test_a_pin_holds_the_device_only_until_host_memory_has_a_copy(
    write_policy: WritePolicy,
) -> None:
    """Regression: under write-back, a pinned prompt kept its device pages until the pin expired."""
    ranks = RanksInTurn(2, device_pages=4, host_pages=4, store=False, write_policy=write_policy)
    tokens = prompt(1)
    ranks.every(lambda cache: cache.load_back("a", tokens[:-1], reserve_tokens=len(tokens)))
    ranks.every(lambda cache: cache.insert("a", tokens))
    ranks.every(lambda cache: cache.release("a"))
    ranks.every(lambda cache: cache.pin("p", tokens, ttl_s=60.0))
    allocator = ranks.caches[0].inspection.prefixes.allocator
    assert allocator.available(0, 0) == 2

    ranks.settle()
    ranks.step()

    assert host_pages(ranks) == 2
    assert allocator.available(0, 0) == 4


def test_pins_are_bounded_and_named_once() -> None:
    ranks = RanksInTurn(2, store=False, bounds=Bounds(pinned_pages=3))
    for first in (1, 2):
        serve(ranks, f"r{first}", prompt(first))

    assert ranks.every(lambda cache: cache.pin("a", prompt(1), ttl_s=1.0)) == 8
    assert ranks.every(lambda cache: cache.pin("b", prompt(2), ttl_s=1.0)) == 0
    assert ranks.every(lambda cache: cache.pin("c", prompt(7), ttl_s=1.0)) == 0
    with pytest.raises(UsageError, match="there is a pin 'a' already"):
        ranks.caches[0].pin("a", prompt(2), ttl_s=1.0)
    with pytest.raises(UsageError, match="ttl_s is 0"):
        ranks.caches[0].pin("d", prompt(2), ttl_s=0)


def test_a_name_that_is_pinned_again_has_the_new_deadline() -> None:
    ranks = RanksInTurn(2, store=False)
    ranks.step()
    serve(ranks, "r", prompt(1))
    ranks.every(lambda cache: cache.pin("p", prompt(1), ttl_s=5.0))
    ranks.every(lambda cache: cache.unpin("p"))
    ranks.every(lambda cache: cache.pin("p", prompt(1), ttl_s=20.0))

    ranks.pass_time(10)
    assert ranks.every(lambda cache: "p" in cache.inspection.pins)
    ranks.pass_time(10)
    assert ranks.every(lambda cache: "p" not in cache.inspection.pins)


def test_pins_that_have_ended_are_forgotten_long_before_their_deadlines() -> None:
    ranks = RanksInTurn(1, store=False)
    ranks.step()
    serve(ranks, "r", prompt(1))
    (cache,) = ranks.caches

    for number in range(1000):
        cache.pin(f"p{number}", prompt(1), ttl_s=1000.0)
        cache.unpin(f"p{number}")

    assert len(cache._replica.pinning._deadlines) < 100  # pyright: ignore[reportPrivateUsage]
    assert cache.pin("p", prompt(1), ttl_s=1000.0) == 8


def half_saved_to_leave() -> RanksInTurn:
    """Return a rank that copied the start of a run to the host, in order to evict it under a quota.

    The end of the run stays on the device. The run was split during the copy. When the copy ends, the
    namespace is within its quota.
    """
    limits = (NamespaceLimit(namespace="small", device_pages=5),)
    ranks = RanksInTurn(
        1,
        store=False,
        device_pages=20,
        host_pages=40,
        write_policy=WritePolicy.WRITE_BACK,
        limits=limits,
    )
    (cache,) = ranks.caches
    short, long = list(range(1000, 1000 + 3 * PAGE_TOKENS)), list(range(6 * PAGE_TOKENS))
    compute(cache, "short", short)
    cache.pin("p", short, "small", ttl_s=1000.0)
    ranks.settle()
    cache.unpin("p")
    compute(cache, "long", long)
    cache.load_back("again", short, "small")
    cache.release("again")
    ranks.step()
    cache.load_back("hog", [], "large", reserve_tokens=9 * PAGE_TOKENS)
    branch = [*long[: 4 * PAGE_TOKENS], *[7] * PAGE_TOKENS]
    assert cache.load_back("x", branch, "small", reserve_tokens=20 * PAGE_TOKENS) is Wait.NO_ROOM
    cache.release("x")
    free = cache.inspection.prefixes.allocator.pools[DEVICE][0].free
    cache.load_back("hog 2", [], "large", reserve_tokens=(free + 3) * PAGE_TOKENS)
    for executor in ranks.executors:
        executor.complete_only(CopyToHost)
    ranks.step()
    return ranks


def compute(cache: Cache, name: str, tokens: Sequence[int]) -> None:
    cache.load_back(name, [], "small", reserve_tokens=len(tokens))
    cache.insert(name, tokens)
    cache.release(name)


def test_what_was_saved_to_leave_and_stays_counts_as_kept() -> None:
    """Pages copied for an eviction stay on the device if the namespace is within its quota by then."""
    ranks = half_saved_to_leave()

    ranks.step()

    limits = ranks.caches[0].inspection.prefixes.allocator.limits
    assert limits.leaving(DEVICE) == []
    assert cached(ranks, list(range(6 * PAGE_TOKENS)), "small") == (5, 6)


def test_a_run_of_which_a_part_was_saved_to_leave_is_one_again_when_it_is_used() -> None:
    ranks = half_saved_to_leave()

    ranks.caches[0].load_back("whole", list(range(6 * PAGE_TOKENS)), "small")

    ranks.check()


@pytest.mark.parametrize("write_policy", WritePolicy)
def test_a_prompt_of_one_page_more_than_the_quota_keeps_as_much_as_the_quota(
    write_policy: WritePolicy,
) -> None:
    """A run longer than its namespace's quota is split, so that only the surplus pages are evicted."""
    limits = (NamespaceLimit(namespace="small", device_pages=5, host_pages=3),)
    ranks = RanksInTurn(2, store=False, limits=limits, write_policy=write_policy)
    tokens = prompt(1, pages=6)

    serve(ranks, "r", tokens, "small")
    ranks.settle()
    ranks.step()

    assert cached(ranks, tokens, "small") == (5, 5)
    assert host_pages(ranks) <= 3


def test_a_namespace_that_found_no_room_is_not_remembered() -> None:
    """Rule R10: each request may use its own salt, so empty namespaces must be forgotten."""
    limits = (NamespaceLimit(namespace=ANY_NAMESPACE, ttl_s=3600.0),)
    bounds = Bounds(pinned_pages=2)
    ranks = HostRanksInTurn(1, host_pages=2, store=False, limits=limits, bounds=bounds)
    (cache,) = ranks.caches
    back_up(ranks, "kept", prompt(1))
    assert cache.pin("kept", prompt(1), ttl_s=1000.0) == 8

    for salt in range(20):
        back_up(ranks, f"r{salt}", prompt(2), namespace=f"salt {salt}")

    assert cache.inspection.prefixes.allocator.limits.namespaces == {""}


def back_up(ranks: HostRanksInTurn, name: str, tokens: list[int], namespace: str = "") -> None:
    ranks.every(lambda cache: cache.back_up(name, tokens, range(2), namespace))
    ranks.every(lambda cache: cache.begin_backups())
    ranks.settle()
    ranks.every(lambda cache: cache.release(name))


def test_a_quota_waits_for_what_a_request_holds() -> None:
    limits = (NamespaceLimit(namespace=ANY_NAMESPACE, device_pages=1),)
    ranks = RanksInTurn(2, store=False, host_pages=0, limits=limits)
    tokens = prompt(1)
    ranks.every(lambda cache: cache.load_back("a", tokens[:-1], reserve_tokens=len(tokens)))
    ranks.every(lambda cache: cache.insert("a", tokens))
    ranks.step()
    assert cached(ranks, tokens) == (2, 2)

    ranks.every(lambda cache: cache.release("a"))
    ranks.step()
    assert cached(ranks, tokens)[0] <= 1


def test_what_is_not_used_for_its_time_leaves_in_agreed_time() -> None:
    """Rule R14: TTLs expire by agreed time, and therefore in the same step on every rank."""
    limits = (NamespaceLimit(namespace="brief", ttl_s=10.0),)
    ranks = RanksInTurn(2, store=False, limits=limits)
    ranks.step()
    serve(ranks, "a", prompt(1), "brief")
    serve(ranks, "b", prompt(1))
    ranks.pass_time(8)
    serve(ranks, "a again", prompt(1), "brief")
    ranks.pass_time(8)
    assert cached(ranks, prompt(1), "brief") == (2, 2)

    ranks.pass_time(3)
    assert cached(ranks, prompt(1), "brief") == (0, 0)
    assert cached(ranks, prompt(1)) == (2, 2)


def test_limits_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="limit of namespace 'a': host_pages is -1"):
        NamespaceLimit(namespace="a", host_pages=-1)
    with pytest.raises(ConfigError, match=r"limit of namespace 'a': ttl_s is 0, must be at least"):
        NamespaceLimit(namespace="a", ttl_s=0)
    with pytest.raises(ConfigError, match="limits must name each namespace once: a, a"):
        RanksInTurn(2, limits=(NamespaceLimit(namespace="a"), NamespaceLimit(namespace="a")))


def test_pins_hold_at_most_half_of_the_device() -> None:
    ranks = RanksInTurn(2, store=False, device_pages=6, host_pages=0)
    for first in (1, 2):
        serve(ranks, f"r{first}", prompt(first))

    assert ranks.every(lambda cache: cache.pin("one", prompt(1), ttl_s=60.0)) == 8
    assert ranks.every(lambda cache: cache.pin("two", prompt(2), ttl_s=60.0)) == 0


def test_a_priority_that_is_no_integer_is_refused_and_changes_nothing() -> None:
    ranks = RanksInTurn(1)
    before = ranks.caches[0].inspection.state_digest

    with pytest.raises(UsageError, match="priority must be an integer"):
        ranks.caches[0].load_back("a", [], priority=1.5)  # type: ignore[arg-type]
    assert ranks.caches[0].inspection.state_digest == before


class NewestFirst:
    name = "newest"

    def grade(self, node: Graded) -> int:
        return -node.last_access


@pytest.fixture(scope="session")
def newest_first() -> str:
    """Register a policy, which is possible only once per process; return its name."""
    register_eviction_policy(NewestFirst())
    return NewestFirst.name


def test_a_policy_of_another_package_is_chosen_by_its_name(newest_first: str) -> None:
    ranks = RanksInTurn(2, device_pages=5, host_pages=0, store=False, eviction=newest_first)
    for first in (1, 2):
        serve(ranks, f"r{first}", prompt(first))

    ranks.every(lambda cache: cache.load_back("d", [], reserve_tokens=3 * PAGE_TOKENS))

    assert [cached(ranks, prompt(first))[0] for first in (1, 2)] == [2, 0]
    with pytest.raises(ConfigError, match="unknown eviction policy 'oldest'; known: "):
        RanksInTurn(2, eviction="oldest")


@pytest.mark.parametrize("host", [1, 4, 8])
def test_write_back_ends_where_host_memory_is_smaller_than_what_has_to_leave(host: int) -> None:
    """Regression: with too little host memory, write-back copies evicted each other forever."""
    ranks = RanksInTurn(
        2, store=False, device_pages=16, host_pages=host, write_policy=WritePolicy.WRITE_BACK
    )
    for first in range(5):
        serve(ranks, f"r{first}", prompt(first))

    admit(ranks, "all", 16, tries=20)
