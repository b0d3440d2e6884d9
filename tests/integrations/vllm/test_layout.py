"""vLLM's KV tensors as pages, and the engines that are refused."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.vllm import handover
from lockstep.integrations.vllm.engine_layout import EngineLayout, require_supported
from tests.kit.vllm.configuration import Engine, Parallel, Transfer

TOKENS, HEADS, ELEMENTS = 32, 2, 64


@dataclass
class FullAttention:
    """What a layer of full attention keeps."""

    block_size: int = TOKENS


class Latent(FullAttention):
    """Another layout, made from it."""


@dataclass
class Layers:
    """A group of layers."""

    layer_names: list[str]
    kv_cache_spec: FullAttention = field(default_factory=FullAttention)


@dataclass
class CacheConfig:
    """The groups of a model."""

    kv_cache_groups: list[Layers]


def tensors(layers: int = 3, *, blocks: int = 5, dtype: torch.dtype = torch.bfloat16) -> Any:
    names = [f"layer {number}" for number in range(layers)]
    return {name: torch.zeros(blocks, HEADS, TOKENS, ELEMENTS, dtype=dtype) for name in names}


def described(kv_caches: dict[str, torch.Tensor], **layers: Any) -> EngineLayout:
    groups = [Layers(list(kv_caches), **layers)]
    return EngineLayout.of(CacheConfig(groups), 2, kv_caches)


def test_a_page_is_a_block_and_its_heads_are_those_of_all_ranks() -> None:
    layout = described(tensors()).layout
    column = layout.columns[0]

    assert layout.page_tokens == TOKENS
    assert (column.layers, column.heads, column.elements) == (3, 2 * HEADS, ELEMENTS)
    assert column.dtype == "bfloat16"


def test_layers_keep_the_order_of_their_group_whatever_order_they_are_registered_in() -> None:
    kv_caches = tensors()
    groups = [Layers(list(reversed(kv_caches)))]

    found = EngineLayout.of(CacheConfig(groups), 2, kv_caches)

    assert [id(each) for each in found.tensors] == [
        id(each) for each in reversed(kv_caches.values())
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
        EngineLayout.of(CacheConfig(groups), 2, tensors())


def test_a_layer_without_a_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match="no KV tensor for layer 9"):
        EngineLayout.of(CacheConfig([Layers(["layer 0", "layer 9"])]), 2, tensors())


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
    parallel = replace(Parallel(), distributed_executor_backend="mp")

    with pytest.raises(ConfigError, match="start with torchrun, set VLLM_ENABLE_V1"):
        handover.take("nobody has left anything", parallel)


def test_what_the_worker_leaves_is_taken_once() -> None:
    left = handover.put("an engine", tensors())

    assert handover.take("an engine", Parallel()) is left
    with pytest.raises(ConfigError):
        handover.take("an engine", Parallel())
