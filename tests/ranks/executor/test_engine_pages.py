"""Engine-owned device pages: read through the engine's tensors, and fenced before an overwrite."""

import threading
from collections.abc import Iterator

import pytest
import torch

from lockstep.coordinator.ballot import TransferEnded
from lockstep.errors import ConfigError, UsageError
from lockstep.page_format.page_layout import Column, PageLayout, ShardLayout
from lockstep.ranks.executor import population
from lockstep.ranks.executor.engine_pages import EnginePages, dtype_name
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.pools import HostPool, TierPools
from lockstep.ranks.executor.population import Population
from lockstep.ranks.protocol.orders import (
    KV_POOL,
)
from tests.kit.devices import DEVICES
from tests.kit.ranks.executor_parts import (
    PATIENCE_S,
    happened,
    includes,
    to_device,
    to_host,
)

LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 3, 6, 2, 4, 5


def shard() -> ShardLayout:
    column = Column(name="kv", layers=LAYERS, heads=HEADS, elements=ELEMENTS, dtype="float32")
    return PageLayout(page_tokens=TOKENS, columns=(column,)).shard(0, 1)


def separate() -> list[torch.Tensor]:
    return [torch.rand(BLOCKS, HEADS, TOKENS, ELEMENTS) for _ in range(LAYERS)]


def tokens_first() -> list[torch.Tensor]:
    """Tensors with the token axis before the head axis, as in SGLang."""
    return [torch.rand(BLOCKS, TOKENS, HEADS, ELEMENTS) for _ in range(LAYERS)]


def tokens_first_in_memory() -> list[torch.Tensor]:
    """Tensors with heads first in their shape and tokens first in memory, as in vLLM's LBNHC."""
    return [each.transpose(1, 2) for each in tokens_first()]


def heads_before_blocks() -> list[torch.Tensor]:
    """Tensors in which one head's data of all blocks is contiguous, as in vLLM's LHBNC."""
    return list(torch.rand(LAYERS, HEADS, BLOCKS, TOKENS, ELEMENTS).transpose(1, 2))


def blocks_of_heads() -> list[torch.Tensor]:
    """Tensors with all layers inside each head of a block, as in vLLM's BHLNC."""
    return list(torch.rand(BLOCKS, HEADS, LAYERS, TOKENS, ELEMENTS).permute(2, 0, 1, 3, 4))


def layers_in_one_storage() -> list[torch.Tensor]:
    """Tensors whose layers follow each other in one allocation, as in vLLM on the CPU."""
    return list(torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS))


def blocks_in_one_storage() -> list[torch.Tensor]:
    """Tensors in one allocation, with the layers of each block adjacent."""
    whole = torch.rand(BLOCKS, LAYERS, HEADS, TOKENS, ELEMENTS)
    return [whole[:, layer] for layer in range(LAYERS)]


def elements_before_tokens() -> list[torch.Tensor]:
    """Tensors with the token axis innermost in memory, as for vLLM's keys on a CPU."""
    return list(torch.rand(LAYERS, BLOCKS, HEADS, ELEMENTS, TOKENS).transpose(3, 4))


def halves_of_heads() -> list[torch.Tensor]:
    """Tensors that view one half of each token's elements, as for keys stored next to their values."""
    return list(torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, 2 * ELEMENTS)[..., :ELEMENTS])


def pairs_of_tokens() -> list[torch.Tensor]:
    """Tensors with interleaved pairs of tokens, as for vLLM's values in CPU tiles."""
    whole = torch.rand(LAYERS, BLOCKS, HEADS, TOKENS // 2, ELEMENTS, 2)
    return list(whole.transpose(4, 5))


ARRANGEMENTS = {
    "separate": separate,
    "layers first": layers_in_one_storage,
    "blocks first": blocks_in_one_storage,
    "tokens first in memory": tokens_first_in_memory,
    "heads before blocks": heads_before_blocks,
    "blocks of heads": blocks_of_heads,
    "elements before tokens": elements_before_tokens,
    "halves of heads": halves_of_heads,
    "pairs of tokens": pairs_of_tokens,
}


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "cpu")


@pytest.fixture
def layers(request: pytest.FixtureRequest, device: str) -> list[torch.Tensor]:
    with torch.device(device):
        return ARRANGEMENTS[getattr(request, "param", "separate")]()


@pytest.fixture
def executor(layers: list[torch.Tensor], device: str) -> Iterator[RankExecutor]:
    pages = EnginePages(shard(), {"kv": layers})
    pair = TierPools(pages, HostPool(shard(), 8, pinned=device == "cuda"))
    executor = RankExecutor({KV_POOL: pair}, close_timeout_s=PATIENCE_S)
    yield executor
    executor.close()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("layers", ARRANGEMENTS, indirect=True)
def test_blocks_of_an_engine_keep_every_byte_on_their_way_to_the_host_and_back(
    executor: RankExecutor, layers: list[torch.Tensor]
) -> None:
    before = [layer.clone() for layer in layers]
    done = includes(TransferEnded(1, ok=True))
    happened(executor, [to_host(1, [5, 0, 3], [2, 3, 7])], done)
    for layer in layers:
        layer.zero_()

    happened(executor, [to_device(2, [7, 2, 3], [1, 5, 0])], includes(TransferEnded(2, ok=True)))

    expected = [torch.zeros_like(layer) for layer in before]
    for layer, was in zip(expected, before, strict=True):
        layer[[1, 5, 0]] = was[[3, 5, 0]]
    assert [torch.equal(*each) for each in zip(layers, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([], "no KV tensor"),
        (separate()[:2], "3 layers, and the engine has 2 KV tensors"),
        (
            [torch.rand(BLOCKS, HEADS, TOKENS, 9)] * 3,
            "4, 9] of float32, .* and a page of the layout has 2 heads, 4 tokens and 20 bytes",
        ),
        (tokens_first(), "which is to be .pages, heads, tokens, elements."),
        ([torch.rand(BLOCKS, HEADS * TOKENS, ELEMENTS)] * 3, "which is to be"),
        ([torch.rand(BLOCKS, HEADS, 5, 2, 2)] * 3, "which is to be"),
        ([torch.rand(1, HEADS, TOKENS, ELEMENTS).expand(BLOCKS, -1, -1, -1)] * 3, "pages overlap"),
    ],
)
def test_tensors_that_are_no_pages_are_refused(layers: list[torch.Tensor], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EnginePages(shard(), {"kv": layers})


def test_a_type_that_no_column_has_is_refused() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(ConfigError, match="float64 is not supported"):
        dtype_name(torch.float64)


def test_an_engine_s_pages_are_no_pool_of_ours(executor: RankExecutor) -> None:
    with pytest.raises(UsageError, match="the device pages are the engine's"):
        _ = executor.device_pool


def populating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-populate"]


def test_population_changes_no_byte_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "_CHUNK_BYTES", 1 << 20)
    pool = HostPool(shard(), (4 << 20) // shard().page_bytes, pinned=False)
    pool.bytes_tensor[3].fill_(7)

    stopped = Population([pool.bytes_tensor], lambda: True)
    assert not bool(stopped.join(0.02)), "it does not wait while the store is busy"
    stopped.stop()
    assert stopped.join(PATIENCE_S)
    Population([pool.bytes_tensor], lambda: False)
    for thread in populating():
        thread.join(PATIENCE_S)

    assert populating() == []
    assert bool((pool.bytes_tensor[3] == 7).all())
    assert not pool.bytes_tensor[4:].any()
