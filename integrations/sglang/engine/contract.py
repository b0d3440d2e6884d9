"""Protocols for the attributes and methods of SGLang's objects that Lockstep uses.

SGLang is not imported here, so that decision logic can be tested without SGLang. These protocols cover
the objects that SGLang passes to Lockstep; stubs of the classes that Lockstep imports are in
`typings/sglang`.
"""

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch

Node: TypeAlias = Any
"""SGLang's id of a node in its radix tree: an integer, except in the session caches that Lockstep
refuses."""

Lock: TypeAlias = Any
"""Handle of a lock on a path of SGLang's radix tree; passed to `unlock` to release the lock."""

Handle: TypeAlias = Any
"""SGLang's id of a request in its queue; hashable, and the same on every rank."""


class KvRow(Protocol):
    """The location of a request's KV on the device: a row of SGLang's request table."""

    req_pool_idx: Any
    kv_committed_len: int
    mamba_pool_idx: torch.Tensor | None
    """The state-pool slot with the request's working state, which each forward pass updates."""
    mamba_ping_pong_track_buffer: Any
    """State-pool slots into which SGLang copies the request's recurrent state at intervals."""
    mamba_last_track_idx: Any
    mamba_last_track_seqlen: int | None
    """Number of tokens that the latest copy of the request's recurrent state covers; None after the
    radix tree has taken over this copy."""
    mamba_prev_track_seqlen: int | None


class MultimodalItem(Protocol):
    """`sglang.srt.managers.schedule_batch.MultimodalDataItem`: an image, a video or a recording."""

    modality: Enum
    format: Enum
    hash: int | None
    """The key under which SGLang caches the item's embeddings: a hash, which a client may supply."""
    pad_value: int | None
    pad_values: Sequence[int] | None
    """Token ids that replace the item's placeholders, in order; None if `pad_value` replaces every
    placeholder."""
    offsets: Sequence[tuple[int, int]] | None
    """(first, last) token position of each run of the item's consecutive placeholders."""
    feature: object | None
    """The encoder's input for the multimodal item; None after SGLang has consumed it."""
    precomputed_embeddings: object | None
    """Embeddings of the multimodal item, computed by an encoder in another process."""
    model_specific_data: dict[str, object]


class MultimodalInputs(Protocol):
    """`sglang.srt.managers.schedule_batch.MultimodalInputs`: the multimodal items of a prompt."""

    num_image_tokens: int | None
    """Number of tokens that a separate (cross-attention) encoder computes from the items; None if the
    model has no such encoder."""

    @property
    def mm_items(self) -> Sequence[MultimodalItem]:
        """The prompt's multimodal items; items of the same modality are in the order of the prompt."""
        ...


class SglangRequest(Protocol):
    """The attributes of an SGLang request that Lockstep reads."""

    rid: str
    cache_request_handle: Handle
    extra_key: str | None
    cache_salt: str | None
    lora_id: str | None
    kv: KvRow
    last_node: Node
    prefix_len: int
    extend_end: int | None
    origin_input_ids: "array[int]"
    output_ids: "array[int]"
    full_untruncated_fill_ids: "array[int]"
    sampling_params: Any
    multimodal_inputs: MultimodalInputs | None
    input_embeds: object | None
    positional_embed_overrides: object | None

    def finished(self) -> bool: ...


class SlotAllocator(Protocol):
    """SGLang's memory budget in an admission pass: for how many more tokens it can allocate KV."""

    @property
    def remaining_total(self) -> float:
        """Return the number of full-attention tokens for which SGLang can still allocate slots."""
        ...

    @property
    def remaining_swa(self) -> float:
        """Return the number of window tokens for which slots remain; 0 for a model without windows."""
        ...


class PagedAllocator(Protocol):
    """Allocator of one pool's slots; it allocates whole pages."""

    def available_size(self) -> int: ...

    def alloc(self, need_size: int) -> torch.Tensor | None: ...

    def free(self, free_index: torch.Tensor) -> None: ...


class WindowAllocator(Protocol):
    """Allocator of a windowed model, with full-attention slots and window slots.

    All tokens have full-attention slots. Only tokens in the window need window slots.
    """

    full_to_swa_index_mapping: torch.Tensor

    @property
    def full_attn_allocator(self) -> PagedAllocator: ...

    @property
    def swa_attn_allocator(self) -> PagedAllocator: ...

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None: ...

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None: ...


class StateRows(Protocol):
    """SGLang's table of running requests, one row each, with the allocator of state slots."""

    enable_mamba_extra_buffer: bool
    mamba_ping_pong_track_buffer_size: int

    @property
    def mamba_allocator(self) -> PagedAllocator: ...

    def get_mamba_ping_pong_other_idx(self, mamba_next_track_idx: Any) -> Any: ...


class KvBuffers(Protocol):
    """SGLang's key tensors and value tensors on the device, one of each per layer."""

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    layout: Any


class MhaBuffers(Protocol):
    """The device tensors of an attention pool, with page size, head counts and dtype."""

    buffers: KvBuffers
    page_size: int
    head_num: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scales: object | None


class LatentBuffers(Protocol):
    """The device tensors of a latent-attention pool, with page size, layer count and dtype."""

    buffers: object
    """The device tensors: a tuple with one tensor [tokens, 1, elements] per layer. Lockstep supports no
    other form."""
    device_layer_num: int
    page_size: int
    kv_cache_dim: int
    dtype: torch.dtype
    scales: object | None


class StateBuffers(Protocol):
    """The tensors of a pool of recurrent states, each [layers, slots, ...]."""

    conv: Sequence[torch.Tensor]
    temporal: torch.Tensor
    extra_checkpoint_buffers: Sequence[object]


class ForwardBatch(Protocol):
    """The requests and the forward mode (such as prefill or decode) of one forward pass."""

    reqs: Sequence[SglangRequest]
    forward_mode: Any
