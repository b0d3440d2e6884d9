"""What the plug-in uses of vLLM's description of its KV cache, as of vLLM 0.32; see `contract`."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch


class AttentionSpec(Protocol):
    """`vllm.v1.kv_cache_interface.AttentionSpec`."""

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        ...

    @property
    def head_size(self) -> int:
        """Elements of a key."""
        ...

    @property
    def head_size_v(self) -> int:
        """Elements of a value."""
        ...

    @property
    def num_head_slots(self) -> int | None:
        """The heads of a block, where they are not the model's KV heads."""
        ...

    @property
    def tokens_per_state(self) -> object:
        """How many tokens one entry stands for; a number."""
        ...

    @property
    def state_content_bytes(self) -> int | None:
        """What one head and token take, where it is not the elements of a key and a value."""
        ...


class WindowSpec(Protocol):
    """`vllm.v1.kv_cache_interface.SlidingWindowSpec`."""

    @property
    def sliding_window(self) -> int:
        """The last tokens that a token attends to, itself included."""
        ...

    @property
    def extra_retained_tokens(self) -> int:
        """Tokens before these that are kept for drafts."""
        ...


class LatentSpec(Protocol):
    """`vllm.v1.kv_cache_interface.MLAAttentionSpec`."""

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        ...

    @property
    def cache_role(self) -> Enum:
        """Whether it is an index of sparse attention; a `SparseCacheRole`."""
        ...


class StateSpec(Protocol):
    """`vllm.v1.kv_cache_interface.MambaSpec`."""

    @property
    def block_size(self) -> int:
        """How many tokens lie between states that are kept."""
        ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """What one rank has: the inputs of a convolution, and what the recurrence has come to."""
        ...

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """The types of these."""
        ...

    @property
    def mamba_type(self) -> Enum:
        """What computes it; a `MambaAttentionBackendEnum`."""
        ...

    @property
    def mamba_cache_mode(self) -> str:
        """Which states are kept."""
        ...

    @property
    def tp_replicated(self) -> bool:
        """Whether every rank has all of it."""
        ...


class CacheGroup(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheGroupSpec`."""

    layer_names: list[str]

    @property
    def kv_cache_spec(self) -> AttentionSpec:
        """What the layers of the group keep."""
        ...


class EngineCacheConfig(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`."""

    @property
    def kv_cache_groups(self) -> Sequence[CacheGroup]:
        """The groups of layers that share block tables."""
        ...


class HashedCacheConfig(EngineCacheConfig, Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`, with how its blocks are hashed."""

    @property
    def hash_block_size(self) -> int | None:
        """Tokens that one hash of the engine's takes in."""
        ...

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether workers overwrite a block with zeros before a request gets it."""
        ...
