"""A simulated group that stores only page ids has the same hits as one with all tokens."""

from collections.abc import Iterator
from itertools import islice

import pytest

from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from lockstep.ranks.replica.check import check
from lockstep.ranks.replica.replica import Replica
from lockstep.simulation.planning.group import InstantGroup, Served
from lockstep.simulation.planning.key_store import KeyStore
from lockstep.simulation.planning.oracles import belady, ideal, paths
from lockstep.simulation.planning.prompts import PagedPrompt, paged
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests

TOKEN_BYTES = 4
REQUESTS = list(islice(synthetic_requests(3, 300), 300))
WINDOW = ComponentSettings(
    kind="sliding_window", pool="window", device_pages=60, host_pages=80, every_pages=4
)
STATE = ComponentSettings(
    kind="recurrent", pool="state", device_pages=30, host_pages=60, every_pages=8
)


def config(
    device: int,
    host: int = 0,
    *,
    components: tuple[ComponentSettings, ...] = (),
    has_store: bool = False,
    eviction: str = "lru",
) -> ReplicaConfig:
    return ReplicaConfig(
        page_tokens=1,
        device_pages=device,
        host_pages=host,
        components=components,
        has_store=has_store,
        model_digest=b"model",
        eviction=eviction,
    )


def serve(group: InstantGroup, prompts: list[PagedPrompt]) -> list[int]:
    served = [group.serve(each) for each in prompts]
    return [sum(each) if each is not None else 0 for each in served]


def hits_with_all_tokens(page_tokens: int, device_pages: int) -> Iterator[int]:
    """Yield each request's hit pages on a real replica with all tokens and only device memory."""
    replica = Replica(
        ReplicaConfig(
            page_tokens=page_tokens,
            device_pages=device_pages,
            host_pages=0,
            has_store=False,
            model_digest=b"model",
        )
    )
    for request in REQUESTS:
        tokens = request.prompt_tokens.tobytes()
        answer, _ = replica.load_back(
            request.name, "", tokens[:-TOKEN_BYTES], request.prompt_length
        )
        assert isinstance(answer, Admission)
        replica.insert(request.name, tokens, final=True)
        replica.release(request.name)
        yield answer.cached_tokens // page_tokens


@pytest.mark.parametrize(("page_tokens", "device_pages"), [(64, 130), (128, 90), (512, 20)])
def test_a_page_of_one_id_is_served_as_one_of_all_its_tokens(
    page_tokens: int, device_pages: int
) -> None:
    group = InstantGroup(config(device_pages), chunk_pages=device_pages)

    hits = serve(group, paged(REQUESTS, page_tokens))

    assert hits == list(hits_with_all_tokens(page_tokens, device_pages))


def test_a_store_without_a_bound_hits_all_that_can_be_hit() -> None:
    prompts = paged(REQUESTS, 64)
    store = KeyStore({"kv": 1})
    group = InstantGroup(config(130, 300, has_store=True), chunk_pages=130, store=store)

    hits = serve(group, prompts)

    assert hits == ideal(paths(prompts)[0])
    assert group.moved["l2_to_l3", "kv"] == paths(prompts)[1]


def test_each_tier_has_a_part_in_what_is_hit() -> None:
    store = KeyStore({"kv": 1}, 400)
    group = InstantGroup(config(110, 130, has_store=True), chunk_pages=110, store=store)

    served = [group.serve(each) for each in paged(REQUESTS, 64)]

    known = [each for each in served if each is not None]
    assert len(known) == len(REQUESTS)
    assert all(sum(each[tier] for each in known) > 50 for tier in range(3))
    assert store.nbytes <= 400


@pytest.mark.parametrize("components", [(), (WINDOW,), (STATE,), (WINDOW, STATE)])
@pytest.mark.parametrize("has_store", [False, True])
def test_nothing_is_left_in_flight_and_no_invariant_is_broken(
    components: tuple[ComponentSettings, ...], has_store: bool
) -> None:
    store = KeyStore({"kv": 1, "window": 1, "state": 1}, 300) if has_store else None
    settings = config(130, 200, components=components, has_store=has_store)
    group = InstantGroup(settings, chunk_pages=32, store=store)

    hits = serve(group, paged(REQUESTS[:150], 64))

    assert group.replica.idle
    check(group.replica)
    assert sum(hits) > 100


@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "priority"])
@pytest.mark.parametrize(("device", "host"), [(110, 0), (110, 150), (200, 0), (200, 300)])
def test_no_policy_hits_more_than_the_best_cache_of_as_many_pages(
    eviction: str, device: int, host: int
) -> None:
    prompts = paged(REQUESTS, 64)
    group = InstantGroup(config(device, host, eviction=eviction), chunk_pages=device)

    hits = serve(group, prompts)

    assert 0 < sum(hits) <= sum(belady(paths(prompts)[0], device + host))


def test_a_prompt_that_the_device_has_no_room_for_is_computed_and_not_kept() -> None:
    short, long = paged(
        [WorkloadRequest(0, 512, 0, (1,)), WorkloadRequest(1, 1025, 0, (1, 2, 3))], 512
    )
    group = InstantGroup(config(2), chunk_pages=2)

    served = [group.serve(each) for each in (short, long, long)]

    assert served == [Served(0, 0, 0), None, None]
