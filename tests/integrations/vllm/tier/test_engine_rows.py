"""Which rows of vLLM's host memory ranks of another TP size can use, by vLLM's own layouts of it."""

import uuid
from types import ModuleType

import pytest
import torch

from .conftest import Opens

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LAYERS, HEADS, HEAD_BYTES = 2, 4, 1024


def test_a_replicated_chunk_goes_from_one_tp_size_to_another(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    one_copy = {"replicated_layout": True, "worker_kv_bytes_per_block": kit.CHUNK_BYTES}
    engines = [
        opens(kit.tier_of(store), parallel=kit.ranks(size), **(one_copy if size > 1 else {}))
        for size in (2, 4, 1)
    ]
    engines[0].store(kit.keys(7))
    engines[0].settle()

    assert [each.hits(kit.keys(7)) for each in engines] == [[True]] * 3


def test_a_canonical_chunk_goes_from_one_tp_size_to_another(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    engines = [
        opens(
            kit.tier_of(store),
            parallel=kit.ranks(size, is_parallelism_agnostic=True),
            canonical_layout=True,
        )
        for size in (2, 1, 4)
    ]
    engines[0].store(kit.keys(7))
    engines[0].settle()

    assert [each.hits(kit.keys(7)) for each in engines] == [[True]] * 3


@pytest.mark.parametrize("is_agnostic", [False, True])
def test_a_chunk_in_the_order_of_workers_serves_the_same_tp_size_alone(
    kit: ModuleType, opens: Opens, store: str, is_agnostic: bool
) -> None:
    sizes = [kit.ranks(size, is_parallelism_agnostic=is_agnostic) for size in (2, 2, 1, 4)]
    engines = [opens(kit.tier_of(store), parallel=each) for each in sizes]
    engines[0].store(kit.keys(7))
    engines[0].settle()

    assert [each.hits(kit.keys(7)) for each in engines] == [[True], [True], [False], [False]]


def direct_row(workers: int) -> torch.Tensor:
    """One row as vLLM's workers fill it: each page holds its heads, by layer."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    share = HEADS // workers
    cell = LAYERS * share * HEAD_BYTES
    engine = uuid.uuid4().hex
    regions = [SharedOffloadRegion(engine, 1, rank, cell * workers, cell)
               for rank in range(workers)]  # fmt: skip
    for rank, region in enumerate(regions):
        for layer in range(LAYERS):
            page = region.create_next_worker_view(share * HEAD_BYTES)[0]
            for head in range(share):
                start = head * HEAD_BYTES
                page[start : start + HEAD_BYTES] = 10 * layer + rank * share + head
    row: torch.Tensor = regions[0].base_tensor.clone()
    for region in regions:
        region.cleanup()
    return row


def heads_of(row: torch.Tensor) -> list[int]:
    """What lies where a head's bytes begin: 10 times the layer and the head."""
    return [int(each) for each in row[::HEAD_BYTES]]


@pytest.mark.usefixtures("kit")
def test_vllms_workers_lay_their_layers_one_after_the_other_so_tp_sizes_differ() -> None:
    assert heads_of(direct_row(1)) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert heads_of(direct_row(2)) == [0, 1, 10, 11, 2, 3, 12, 13]
