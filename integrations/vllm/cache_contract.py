"""What the plug-in uses of vLLM's description of its KV cache, as of vLLM 0.32; see `contract`."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch


class AttentionSpec(Protocol):
    """`vllm.v1.kv_cache_interface.AttentionSpec`."""

    block_size: int
    head_size: int
    head_size_v: int
    num_head_slots: int | None
    """The heads of a block, where they are not the model's KV heads."""
    tokens_per_state: int
    """How many tokens one entry stands for."""
    state_content_bytes: int | None
    """What one head and token take, where it is not the elements of a key and a value."""


class WindowSpec(Protocol):
    """`vllm.v1.kv_cache_interface.SlidingWindowSpec`."""

    sliding_window: int
    """The last tokens that a token attends to, itself included."""
    extra_retained_tokens: int
    """Tokens before these that are kept for drafts."""


class LatentSpec(Protocol):
    """`vllm.v1.kv_cache_interface.MLAAttentionSpec`."""

    block_size: int

    @property
    def cache_role(self) -> Enum: ...


class StateSpec(Protocol):
    """`vllm.v1.kv_cache_interface.MambaSpec`."""

    block_size: int
    shapes: Sequence[tuple[int, ...]]
    """What one rank has: the inputs of a convolution, and what the recurrence has come to."""
    dtypes: Sequence[torch.dtype]
    """The types of these."""
    mamba_type: Enum
    """What computes it; a `MambaAttentionBackendEnum`."""
    mamba_cache_mode: str
    """Which states are kept."""
    tp_replicated: bool
    """Whether every rank has all of it."""


class CacheGroup(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheGroupSpec`."""

    layer_names: list[str]
    kv_cache_spec: AttentionSpec
    """What the layers of the group keep."""


class EngineCacheConfig(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`."""

    @property
    def kv_cache_groups(self) -> Sequence[CacheGroup]: ...


class HashedCacheConfig(EngineCacheConfig, Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`, with how its blocks are hashed."""

    hash_block_size: int | None
    """Tokens that one hash of the engine's takes in."""
    needs_kv_cache_zeroing: bool
    """Whether workers overwrite a block with zeros before a request gets it."""
