"""The prefix tree compared with a simple model, and invariants of a split."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.ranks.protocol.events import Cause
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.ranks.replica.core.pages import page_run
from lockstep.ranks.replica.replica import Replica
from lockstep.ranks.replica.tree.node import DEVICE, HOST, Node, TreeIdentity
from lockstep.ranks.replica.tree.prefixes import Prefixes
from lockstep.ranks.replica.tree.ref_counts import LockHandle
from lockstep.ranks.replica.tree.tokens import as_token_bytes, namespace_seed, page_keys
from tests.kit.ranks.in_turn import RanksInTurn

PAGE_TOKENS = 2
PAGE_BYTES = 8

prompts = st.lists(st.integers(0, 2), max_size=14).map(as_token_bytes)


def new_prefixes() -> Prefixes:
    config = ReplicaConfig(
        page_tokens=PAGE_TOKENS,
        device_pages=64,
        host_pages=64,
        has_store=False,
        model_digest=b"model",
    )
    return Replica(config).prefixes


def whole(tokens: bytes) -> bytes:
    return tokens[: len(tokens) - len(tokens) % PAGE_BYTES]


def put(prefixes: Prefixes, tokens: bytes) -> Node:
    root = prefixes.root(TreeIdentity(""))
    nodes = prefixes.walk_to(root, tokens)
    node = nodes[-1] if nodes else root
    if node.end * PAGE_BYTES < len(whole(tokens)):
        node = prefixes.tree.add(node, whole(tokens)[node.end * PAGE_BYTES :])
        prefixes.allocator.attach(
            node, DEVICE, 0, prefixes.allocator.pools[DEVICE][0].take(node.width), Cause.COMPUTED
        )
    return node


@given(st.lists(prompts, max_size=8), prompts)
def test_a_walk_finds_the_longest_prefix_that_was_ever_put_in(
    put_in: list[bytes], prompt: bytes
) -> None:
    prefixes = new_prefixes()
    for tokens in put_in:
        put(prefixes, tokens)

    nodes, _, pages = prefixes.tree.follow(prefixes.root(TreeIdentity("")), prompt)
    found = (nodes[-1].end if nodes else 0) + pages

    known = {tokens[:end] for tokens in put_in for end in range(0, len(tokens) + 1, PAGE_BYTES)}
    obvious = max(
        end // PAGE_BYTES
        for end in range(0, len(prompt) + 1, PAGE_BYTES)
        if not end or prompt[:end] in known
    )
    assert found == obvious


@given(st.lists(prompts, max_size=8))
def test_every_key_in_the_tree_is_the_hash_chain_of_its_whole_prefix(put_in: list[bytes]) -> None:
    prefixes = new_prefixes()
    seed = namespace_seed(b"model", "")

    found = [prefixes.tree.keys(put(prefixes, tokens))[-1] for tokens in put_in]

    assert found == [[seed, *page_keys(seed, tokens, PAGE_TOKENS)][-1] for tokens in put_in]


@given(st.lists(prompts, min_size=1, max_size=6), st.lists(prompts, max_size=6))
def test_a_lock_handle_restores_every_count_also_after_splits(
    first: list[bytes], later: list[bytes]
) -> None:
    """Rule R8: a lock handle holds a token interval; its release restores all counts after splits."""
    prefixes = new_prefixes()
    lock_handles: list[LockHandle] = []
    for tokens in first:
        node = put(prefixes, tokens)
        lock_handles.append(prefixes.allocator.ref_counts.acquire(DEVICE, 0, node))
        lock_handles.append(prefixes.allocator.ref_counts.acquire(HOST, 0, node))
    for tokens in later:
        put(prefixes, tokens)

    for lock_handle in lock_handles:
        prefixes.allocator.ref_counts.release(lock_handle)

    assert all(
        not node.is_held_on(tier) for node in prefixes.tree.nodes() for tier in (DEVICE, HOST)
    )
    assert prefixes.allocator.ref_counts.kept_pages == ([0], [0])
    assert prefixes.allocator.available(DEVICE, 0) == 64


def test_a_split_divides_pages_keys_and_counts_between_both_halves() -> None:
    prefixes = new_prefixes()
    node = put(prefixes, as_token_bytes(range(8)))
    keys = list(prefixes.tree.keys(node))
    lock = prefixes.allocator.ref_counts.acquire(DEVICE, 0, node)

    prefixes.split(node, 1)

    upper = node.parent
    assert upper is not None
    assert (upper.start, upper.end, node.start, node.end) == (0, 1, 1, 4)
    assert upper.pages(DEVICE) == page_run([0])
    assert node.pages(DEVICE) == page_run([1, 2, 3])
    assert [*prefixes.tree.keys(upper), *prefixes.tree.keys(node)] == keys
    assert upper.held[DEVICE] == node.held[DEVICE] == [1]
    prefixes.allocator.ref_counts.release(lock)
    assert upper.held[DEVICE] == node.held[DEVICE] == [0]


def test_a_namespace_leaves_nothing_behind_once_its_pages_and_requests_are_gone() -> None:
    ranks = RanksInTurn(2, device_pages=4, host_pages=0, store=False)
    for salt in ("one", "two", "three"):
        ranks.every(lambda c: c.load_back(salt, [], salt, reserve_tokens=16))
        ranks.every(lambda c: c.insert(salt, list(range(16))))
        ranks.every(lambda c: c.release(salt))
        ranks.check()

    assert [
        root.place.namespace for root in ranks.caches[0].inspection.prefixes.tree.roots.values()
    ] == ["three"]
    assert not ranks.caches[0].inspection.prefixes.users
