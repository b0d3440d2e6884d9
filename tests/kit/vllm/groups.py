"""Objects with the attributes of vLLM's KV cache groups, for tests without vLLM.

The classes have the names of vLLM's classes, because the plug-in distinguishes them by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

TOKENS, HEAD_ELEMENTS = 32, 32


class Role(Enum):
    """The kind of KV cache in a layer with latent attention."""

    SPARSE = "sparse"
    INDEXER = "indexer"


class Mixer(Enum):
    """Kinds of layers with a recurrent state."""

    MAMBA2 = 2
    GDN_ATTN = 3
    SHORT_CONV = 4


@dataclass(kw_only=True)
class Spec:
    """vLLM's description of one layer's KV cache."""

    block_size: int = TOKENS
    head_size: int = HEAD_ELEMENTS
    head_size_v: int = HEAD_ELEMENTS
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


class FullAttentionSpec(Spec):
    """The KV cache of a layer with full attention."""


@dataclass(kw_only=True)
class SlidingWindowSpec(Spec):
    sliding_window: int = 128
    extra_retained_tokens: int = 0


class ChunkedLocalAttentionSpec(Spec):
    """The KV cache of a layer whose attention is limited to the current chunk."""


@dataclass(kw_only=True)
class MLAAttentionSpec(Spec):
    """The KV cache of latent attention, or the index keys of sparse attention."""

    head_size_v: int = 0
    cache_role: Role = Role.SPARSE


@dataclass(kw_only=True)
class MambaSpec:
    block_size: int = TOKENS
    mamba_cache_mode: str = "align"
    mamba_type: Enum = Mixer.MAMBA2
    shapes: Sequence[tuple[int, ...]] = ()
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32)
    tp_replicated: bool = False


@dataclass(kw_only=True)
class UniformTypeKVCacheSpecs:
    """Layers of one kind that share a block table, with KV caches of different sizes."""

    kv_cache_specs: dict[str, Any]
    block_size: int = TOKENS


@dataclass
class Group:
    """Layers that share a block table, and the description of their KV caches."""

    layer_names: list[str]
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)


@dataclass
class CacheConfig:
    """All KV cache groups of a model."""

    kv_cache_groups: Sequence[Group]
    hash_block_size: int | None = None
    needs_kv_cache_zeroing: bool = False


def groups(*specs: Any) -> CacheConfig:
    """Return the KV cache groups of a model: for each of `specs`, a group of two layers."""
    return CacheConfig([Group([f"{at}.a", f"{at}.b"], spec) for at, spec in enumerate(specs)])
