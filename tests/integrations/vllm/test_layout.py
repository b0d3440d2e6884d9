"""vLLM's KV tensors as pages, and the engines that are refused."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.pools.engine_layout import KEYS, VALUES
from lockstep.integrations.vllm import handover
from lockstep.integrations.vllm.engine_layout import EngineLayout, require_supported
from lockstep.page_format.page_layout import Column, PageLayout
from tests.kit.vllm.configuration import Engine, Parallel, Transfer

TOKENS, HEADS, ELEMENTS = 32, 2, 64


@dataclass
class FullAttention:
    """What a layer of full attention keeps."""

    block_size: int = TOKENS
    head_size: int = ELEMENTS // 2
    head_size_v: int = ELEMENTS // 2
    num_head_slots: int | None = None
    state_content_bytes: int | None = None


class Latent(FullAttention):
    """Another layout, made from it."""


@dataclass
class Layers:
    """A group of layers."""

    layer_names: list[str]
    kv_cache_spec: FullAttention = field(default_factory=FullAttention)


@dataclass(frozen=True)
class Backend:
    """What computes attention."""

    name: str

    def get_name(self) -> str:
        return self.name


@dataclass
class Attention:
    """A layer of the model."""

    attn_backend: Backend


def by(backend: str) -> Attention:
    return Attention(Backend(backend))


@dataclass
class CacheConfig:
    """The groups of a model."""

    kv_cache_groups: list[Layers]


def tensors(layers: int = 3, *, blocks: int = 5, dtype: torch.dtype = torch.bfloat16) -> Any:
    names = [f"layer {number}" for number in range(layers)]
    return {name: torch.zeros(blocks, HEADS, TOKENS, ELEMENTS, dtype=dtype) for name in names}


def described(
    kv_caches: dict[str, torch.Tensor], spec: FullAttention | None = None, *backends: str
) -> EngineLayout:
    """Describe layers whose backends are those named, the last one's for all that are left."""
    groups = [Layers(list(kv_caches), spec or FullAttention())]
    named = [*backends, *[(backends or ("FLASH_ATTN",))[-1]] * len(kv_caches)]
    layers = {name: by(backend) for name, backend in zip(kv_caches, named, strict=False)}
    return EngineLayout.of(CacheConfig(groups), 2, kv_caches, layers)


def test_a_page_is_a_block_with_keys_and_values_apart_and_its_heads_are_those_of_all_ranks() -> (
    None
):
    """As it is under SGLang, so that either engine reads what the other one wrote."""
    layout = described(tensors()).layout

    assert layout == PageLayout(
        page_tokens=TOKENS,
        columns=(
            Column(name=KEYS, layers=3, heads=2 * HEADS, elements=ELEMENTS // 2),
            Column(name=VALUES, layers=3, heads=2 * HEADS, elements=ELEMENTS // 2),
        ),
    )


def test_keys_and_values_are_views_of_a_block() -> None:
    kv_caches = tensors(layers=1)
    [block] = kv_caches.values()
    block[1, 0, 3] = torch.arange(ELEMENTS)

    columns = described(kv_caches).tensors

    assert columns["k"][0][1, 0, 3].tolist() == list(range(ELEMENTS // 2))
    assert columns["v"][0][1, 0, 3].tolist() == list(range(ELEMENTS // 2, ELEMENTS))
    assert columns["k"][0].untyped_storage().data_ptr() == block.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("spec", "backends", "named"),
    [
        (FullAttention(), ("A_LATER_ONE",), "kv of A_LATER_ONE"),
        (FullAttention(), ("TRITON_ATTN", "FLASHINFER"), "kv of FLASHINFER, TRITON_ATTN"),
        (FullAttention(state_content_bytes=ELEMENTS), ("FLASHINFER",), "kv of FLASHINFER"),
        (FullAttention(num_head_slots=2), ("FLASHINFER",), "kv of FLASHINFER"),
        (FullAttention(head_size=ELEMENTS), ("FLASHINFER",), "kv of FLASHINFER"),
    ],
)
def test_blocks_of_which_it_is_not_known_where_keys_are_share_with_the_same_backend_alone(
    spec: FullAttention, backends: tuple[str, ...], named: str
) -> None:
    kv_caches = tensors()

    found = described(kv_caches, spec, *backends)

    assert [(each.name, each.elements) for each in found.layout.columns] == [(named, ELEMENTS)]
    assert [id(each) for each in found.tensors[named]] == [id(each) for each in kv_caches.values()]


def test_layers_keep_the_order_of_their_group_whatever_order_they_are_registered_in() -> None:
    kv_caches = tensors()
    groups = [Layers(list(reversed(kv_caches)))]
    layers = dict.fromkeys(kv_caches, by("FLASH_ATTN"))

    found = EngineLayout.of(CacheConfig(groups), 2, kv_caches, layers)

    assert [each.data_ptr() for each in found.tensors["k"]] == [
        each.data_ptr() for each in reversed(kv_caches.values())
    ]


@pytest.mark.parametrize(
    ("kv_caches", "named"),
    [
        ({"a": torch.zeros(4, 2, TOKENS, 8), "b": torch.zeros(4, 2, TOKENS, 9)}, "of one shape"),
        ({"a": torch.zeros(4, TOKENS, 8)}, "of one shape"),
        ({"a": torch.zeros(4, 2, TOKENS // 2, 8)}, "and its KV tensors 16"),
        ({"a": torch.zeros(4, 2, TOKENS, 8, dtype=torch.float64)}, "float64 is not supported"),
    ],
)
def test_tensors_that_are_no_pages_are_refused(
    kv_caches: dict[str, torch.Tensor], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        described(kv_caches)


def test_a_model_with_several_groups_of_layers_is_refused() -> None:
    groups = [Layers(["a"]), Layers(["b"])]

    with pytest.raises(ConfigError, match="2 groups of KV layers"):
        EngineLayout.of(CacheConfig(groups), 2, tensors(), {})


def test_a_layer_without_a_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match="no KV tensor for layer 9"):
        EngineLayout.of(CacheConfig([Layers(["layer 0", "layer 9"])]), 2, tensors(), {})


@pytest.mark.parametrize(
    ("engine", "spec", "named"),
    [
        (Engine(kv_transfer_config=Transfer("fail")), FullAttention(), "kv_load_failure_policy"),
        (
            Engine(Parallel(pipeline_parallel_size=2)),
            FullAttention(),
            "pipeline_parallel_size is 2",
        ),
        (Engine(Parallel(data_parallel_size=2)), FullAttention(), "data_parallel_size is 2"),
        (Engine(), Latent(), "Latent, and LockstepConnector serves FullAttention"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_by_name(
    engine: Engine, spec: object, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        require_supported(engine, spec, FullAttention)


def test_an_engine_with_a_scheduler_on_every_rank_is_served() -> None:
    require_supported(Engine(), FullAttention(), FullAttention)


def test_a_scheduler_without_its_worker_is_told_how_to_start() -> None:
    parallel = replace(Parallel(), distributed_executor_backend="uni")

    with pytest.raises(
        ConfigError, match="executors 'mp' and 'ray', and a scheduler on every rank"
    ):
        handover.take("nobody has left anything", parallel)


def test_what_the_worker_leaves_is_taken_once() -> None:
    left = handover.put("an engine", tensors())

    assert handover.take("an engine", Parallel()) is left
    with pytest.raises(ConfigError):
        handover.take("an engine", Parallel())
