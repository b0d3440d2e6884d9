"""A page has the same bytes under both engines, whatever their memory layouts (rule R16)."""

import pytest
import torch

from lockstep.integrations.kv_description import KEYS, VALUES
from lockstep.integrations.vllm.block_forms import keys_and_values
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import AxisOrder, EnginePages
from lockstep.ranks.executor.gathering import gather, scatter, slab_pairs
from lockstep.ranks.executor.pools import HostPool, TierPools

LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 2, 4, 2, 32, 64
CHOSEN = torch.tensor([3, 1])
LAYOUT = PageLayout(
    page_tokens=TOKENS,
    columns=tuple(
        Column(name=name, layers=LAYERS, heads=HEADS, elements=ELEMENTS) for name in (KEYS, VALUES)
    ),
).shard(0, 1)
FORMS = ["FLASH_ATTN", "CPU_ATTN vec", "CPU_ATTN amx"]


def in_order() -> torch.Tensor:
    """Random KV with the axes [key or value, layer, block, head, token, element]."""
    return torch.rand(2, LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS).to(torch.bfloat16)


def of_vllm(form: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each layer's keys and values as views of zeroed blocks with the layout `form`."""
    whole = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, 2 * ELEMENTS, dtype=torch.bfloat16)
    found = [keys_and_values(form, layer, ELEMENTS) for layer in whole]
    views = [each for each in found if each is not None]
    return [keys for keys, _ in views], [values for _, values in views]


def of_sglang(kv: torch.Tensor) -> TierPools:
    """Return `kv` as SGLang's pages, whose tensors are [pages, tokens, heads, elements]."""
    keys, values = kv.transpose(3, 4).contiguous()
    tensors = {KEYS: list(keys), VALUES: list(values)}
    pages = EnginePages(LAYOUT, tensors, AxisOrder.TOKENS_FIRST)
    return TierPools(pages, HostPool(LAYOUT, 1, pinned=False))


def gathered(pools: TierPools) -> torch.Tensor:
    staging = torch.zeros(len(CHOSEN), LAYOUT.page_bytes, dtype=torch.uint8)
    gather(slab_pairs(pools), CHOSEN, staging)
    return staging


@pytest.mark.parametrize("form", FORMS)
def test_what_sglang_has_of_a_page_is_what_vllm_has_in_its_blocks_in_order(form: str) -> None:
    kv, sides = in_order(), of_vllm(form)
    pages = EnginePages(LAYOUT, dict(zip((KEYS, VALUES), sides, strict=True)))
    pools = TierPools(pages, HostPool(LAYOUT, 1, pinned=False))

    scatter(slab_pairs(pools), CHOSEN, gathered(of_sglang(kv)))

    expected = kv[:, :, CHOSEN]
    found = [each[CHOSEN].reshape(expected.shape[2:]) for side in sides for each in side]
    assert torch.equal(torch.stack(found), expected.flatten(0, 1))
    assert torch.equal(gathered(pools), gathered(of_sglang(kv)))
