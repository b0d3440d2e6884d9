"""vLLM's KV tensors as pages, and unsupported layouts that are refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.kv_description import KEYS, VALUES
from lockstep.integrations.vllm import rank_channel
from lockstep.integrations.vllm.engine_layout import (
    EngineLayout,
    require_drafts_before_saves,
    require_fences,
    require_supported,
)
from lockstep.page_format.page_layout import Column, PageLayout
from tests.kit.vllm.configuration import Attention as EngineAttention
from tests.kit.vllm.configuration import Engine, NewerEngine, Parallel, Speculative, Transfer
from tests.kit.vllm.groups import (
    HEAD_ELEMENTS,
    TOKENS,
    CacheConfig,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    Role,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    groups,
)

HEADS, ELEMENTS = 2, 2 * HEAD_ELEMENTS


def by(backend: str) -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))


def tensors(layers: int = 3, *, blocks: int = 5, dtype: torch.dtype = torch.bfloat16) -> Any:
    names = [f"layer {number}" for number in range(layers)]
    return {name: torch.zeros(blocks, HEADS, TOKENS, ELEMENTS, dtype=dtype) for name in names}


def described(
    kv_caches: dict[str, torch.Tensor], spec: FullAttentionSpec | None = None, *backends: str
) -> EngineLayout:
    """Return the layout of layers with these attention backends.

    If there are fewer backends than layers, the last backend is that of all remaining layers.
    """
    alike = [Group(list(kv_caches), spec or FullAttentionSpec())]
    named = [*backends, *[(backends or ("FLASH_ATTN",))[-1]] * len(kv_caches)]
    layers = {name: by(backend) for name, backend in zip(kv_caches, named, strict=False)}
    return EngineLayout.of(CacheConfig(alike), 2, kv_caches, layers)


def test_a_page_is_a_block_with_keys_and_values_apart_and_its_heads_are_those_of_all_ranks() -> (
    None
):
    """A page has keys and values separate, as under SGLang, so each engine reads the other's pages."""
    layout = described(tensors()).layout

    assert layout == PageLayout(
        page_tokens=TOKENS,
        columns=(
            Column(name=KEYS, layers=3, heads=2 * HEADS, elements=ELEMENTS // 2),
            Column(name=VALUES, layers=3, heads=2 * HEADS, elements=ELEMENTS // 2),
        ),
    )


@pytest.mark.parametrize(
    ("spec", "backends", "named"),
    [
        (FullAttentionSpec(), ("A_LATER_ONE",), "kv of A_LATER_ONE"),
        (FullAttentionSpec(), ("TRITON_ATTN", "FLASHINFER"), "kv of FLASHINFER, TRITON_ATTN"),
        (FullAttentionSpec(state_content_bytes=ELEMENTS), ("FLASHINFER",), "kv of FLASHINFER"),
        (FullAttentionSpec(num_head_slots=2), ("FLASHINFER",), "kv of FLASHINFER on 2 ranks"),
        (FullAttentionSpec(head_size=ELEMENTS), ("FLASHINFER",), "kv of FLASHINFER"),
    ],
)
def test_blocks_of_which_it_is_not_known_where_keys_are_share_with_the_same_backend_alone(
    spec: FullAttentionSpec, backends: tuple[str, ...], named: str
) -> None:
    kv_caches = tensors()

    found = described(kv_caches, spec, *backends)

    assert [(each.name, each.elements) for each in found.layout.columns] == [(named, ELEMENTS)]
    held = found.pools[0].tensors[named]
    assert [id(each) for each in held] == [id(each) for each in kv_caches.values()]


def test_layers_keep_the_order_of_their_group_whatever_order_they_are_registered_in() -> None:
    kv_caches = tensors()
    backwards = CacheConfig([Group(list(reversed(kv_caches)))])
    layers = {name: by("FLASH_ATTN") for name in kv_caches}

    found = EngineLayout.of(backwards, 2, kv_caches, layers)

    assert [each.data_ptr() for each in found.pools[0].tensors["k"]] == [
        each.data_ptr() for each in reversed(kv_caches.values())
    ]


@pytest.mark.parametrize(
    ("kv_caches", "named"),
    [
        ({"a": torch.zeros(4, TOKENS, 8)}, r"tensor of a has shape \[4, 32, 8\], but LockstepConn"),
        ({"a": torch.zeros(4, 2, TOKENS - 8, 8)}, "24, 8.*32 tokens in a block of kv"),
        ({"a": torch.zeros(4, 2, TOKENS, 8, dtype=torch.float64)}, "float64 is not supported"),
    ],
)
def test_tensors_that_are_no_pages_are_refused(
    kv_caches: dict[str, torch.Tensor], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        described(kv_caches)


def test_each_group_of_layers_is_a_pool_over_memory_that_they_share() -> None:
    memory = torch.zeros(5, HEADS, TOKENS, ELEMENTS)
    kv_caches = dict.fromkeys(["0.a", "0.b", "1.a", "1.b"], memory)
    layers = {name: by("FLASH_ATTN") for name in kv_caches}
    described = groups(SlidingWindowSpec(), FullAttentionSpec())

    found = EngineLayout.of(described, 2, kv_caches, layers)

    assert [each.group.name for each in found.pools] == ["kv", "window"]
    assert found.layout == found.pools[1].layout
    assert [each.pool for each in found.components(10)] == ["window"]
    assert set(found.lend(2)) == {"kv", "window"}
    assert found.host_bytes(10, 2) == 2 * 10 * 2 * memory[0].nbytes


def test_a_state_of_unknown_parts_is_what_one_rank_has_and_says_how_many_there_are() -> None:
    state = torch.zeros(5, 1, 1, 100, dtype=torch.int8)
    kv = torch.zeros(5, HEADS, TOKENS, ELEMENTS)
    kv_caches = {"0.a": kv, "0.b": kv, "1.a": state, "1.b": state}
    layers = {name: by("FLASH_ATTN") for name in kv_caches}

    def of(spec: MambaSpec) -> Column:
        found = EngineLayout.of(groups(FullAttentionSpec(), spec), 2, kv_caches, layers)
        assert found.pools[1].layout.page_tokens == 1
        return found.pools[1].layout.columns[0]

    divided = Column(name="state of a rank in 2", layers=2, heads=2, elements=100, dtype="int8")
    everywhere = replace(divided, name="state", heads=1, replicated=True)
    shapes = ((3, 5), (2, 2, 5))
    assert of(MambaSpec(shapes=shapes)) == divided
    assert of(MambaSpec(shapes=shapes, tp_replicated=True)) == everywhere


def test_latent_attention_and_its_index_are_the_same_on_every_rank_and_in_one_page() -> None:
    latent, index = MLAAttentionSpec(), MLAAttentionSpec(cache_role=Role.INDEXER)
    kv_caches = {
        "a": torch.zeros(5, 1, TOKENS, 72, dtype=torch.bfloat16),
        "a.index": torch.zeros(5, 1, TOKENS, 20, dtype=torch.uint8),
        "b": torch.zeros(5, 1, TOKENS, 72, dtype=torch.bfloat16),
    }
    specs = UniformTypeKVCacheSpecs(kv_cache_specs={"a": latent, "a.index": index, "b": latent})

    found = EngineLayout.of(CacheConfig([Group(list(kv_caches), specs)]), 2, kv_caches, {})

    assert found.layout.columns == (
        Column(name="latent", layers=2, heads=1, elements=72, replicated=True),
        Column(name="index", layers=1, heads=1, elements=20, dtype="uint8", replicated=True),
    )


def test_blocks_that_a_backend_reads_in_parts_are_whole_again() -> None:
    parts = torch.arange(6 * HEADS * TOKENS // 2 * ELEMENTS).float()
    parts = parts.view(6, HEADS, TOKENS // 2, ELEMENTS)

    found = described({"layer 0": parts})

    [keys] = found.pools[0].tensors["k"]
    assert found.layout.columns[0] == Column(
        name="k", layers=1, heads=2 * HEADS, elements=HEAD_ELEMENTS, dtype="float32"
    )
    whole = keys.reshape(3, HEADS, TOKENS, HEAD_ELEMENTS)
    assert torch.equal(whole[1, 0, : TOKENS // 2], parts[2, 0, :, :HEAD_ELEMENTS])
    assert torch.equal(whole[1, 0, TOKENS // 2 :], parts[3, 0, :, :HEAD_ELEMENTS])
    assert found.lend(2)["kv"].pages == 3


def test_layers_of_other_sizes_have_columns_of_their_own() -> None:
    narrow, wide = FullAttentionSpec(), FullAttentionSpec(head_size=64, head_size_v=64)
    kv_caches = {
        "a": torch.zeros(5, HEADS, TOKENS, ELEMENTS),
        "b": torch.zeros(5, 1, TOKENS, 2 * ELEMENTS),
    }
    specs = UniformTypeKVCacheSpecs(kv_cache_specs={"a": narrow, "b": wide})
    layers = {name: by("FLASH_ATTN") for name in kv_caches}

    found = EngineLayout.of(CacheConfig([Group(["a", "b"], specs)]), 1, kv_caches, layers)

    assert [(each.name, each.heads, each.elements) for each in found.layout.columns] == [
        ("k", HEADS, 32),
        ("v", HEADS, 32),
        ("k.1", 1, 64),
        ("v.1", 1, 64),
    ]


def test_a_layer_without_a_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match="no KV tensor for layer 9"):
        EngineLayout.of(CacheConfig([Group(["layer 0", "layer 9"])]), 2, tensors(), {})


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (Engine(kv_transfer_config=Transfer("fail")), "kv_load_failure_policy"),
        (Engine(Parallel(pipeline_parallel_size=2)), "pipeline_parallel_size is 2"),
        (Engine(Parallel(data_parallel_size=2)), "data_parallel_size is 2"),
        (Engine(attention_config=EngineAttention("set")), "hisparse_config"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_by_name(engine: Engine, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_supported(engine)


def test_workers_that_clear_blocks_before_they_ask_who_reads_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        require_fences(
            NewerEngine(), CacheConfig([Group(["layer 0"])], needs_kv_cache_zeroing=True)
        )


@pytest.mark.parametrize(("engine", "cleared"), [(NewerEngine(), False), (Engine(), True)])
def test_workers_that_ask_first_or_clear_no_block_are_served(engine: Engine, cleared: bool) -> None:
    kept = CacheConfig([Group(["layer 0"])], needs_kv_cache_zeroing=cleared)

    require_fences(engine, kept)


def test_a_drafter_that_writes_after_vllm_saves_is_refused_with_a_scheduler_on_every_rank() -> None:
    with pytest.raises(ConfigError, match=r"0\.32\.1's model runner V2 .* install vLLM 0\.33"):
        require_drafts_before_saves(NewerEngine(speculative_config=Speculative()), "0.32.1")


@pytest.mark.parametrize(
    ("engine", "version"),
    [
        (NewerEngine(speculative_config=Speculative()), "0.33.0"),
        (Engine(speculative_config=Speculative()), "0.32.1"),
        (NewerEngine(), "0.32.1"),
    ],
)
def test_a_drafter_that_writes_before_vllm_saves_is_served(engine: Engine, version: str) -> None:
    require_drafts_before_saves(engine, version)


def test_what_the_worker_leaves_is_taken_once() -> None:
    left = rank_channel.put("an engine", tensors(), groups(FullAttentionSpec()))

    assert rank_channel.take("an engine", Parallel()) is left
    with pytest.raises(
        ConfigError, match="executors 'mp' and 'ray', and a scheduler on every rank"
    ):
        rank_channel.take("an engine", Parallel())
