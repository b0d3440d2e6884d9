"""What Lockstep uses of SGLang's own objects: as little as it can, named in one place.

SGLang is not imported here, so that what decides can be tested without it. The classes that it has
describe themselves in `typings/sglang`; these are the parts of objects that it hands over.
"""

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch

Node: TypeAlias = Any
"""How SGLang's tree names a node; an integer, but for the sessions that Lockstep refuses."""

Lock: TypeAlias = Any
"""A receipt for a locked path, which unlocks it."""

Handle: TypeAlias = Any
"""How SGLang names a request that waits; the same on every rank, and hashable."""


class KvRow(Protocol):
    """Where a request's KV lies on the device."""

    req_pool_idx: Any
    kv_committed_len: int
    mamba_pool_idx: torch.Tensor | None
    """The slot of the state that it computes in."""
    mamba_ping_pong_track_buffer: Any
    """Slots of states that are tracked beside it; by the indices below."""
    mamba_last_track_idx: Any
    mamba_last_track_seqlen: int | None
    """How many tokens the last of them stands for, unless the tree has taken it over."""
    mamba_prev_track_seqlen: int | None


class MultimodalItem(Protocol):
    """`sglang.srt.managers.schedule_batch.MultimodalDataItem`: an image, a video, a recording."""

    modality: Enum
    format: Enum
    hash: int | None
    """By which SGLang keeps its embeddings; a client may give it."""
    pad_value: int | None
    pad_values: Sequence[int] | None
    """The ids in the place of its placeholders, in turn; None for `pad_value` alone."""
    offsets: Sequence[tuple[int, int]] | None
    """The first and the last of each run of its placeholders."""
    feature: object | None
    """The encoder's input; gone once it has been read."""
    precomputed_embeddings: object | None
    """Embeddings that an encoder in another process has made of it."""
    model_specific_data: dict[str, object]


class MultimodalInputs(Protocol):
    """`sglang.srt.managers.schedule_batch.MultimodalInputs`: the items of a prompt."""

    num_image_tokens: int | None
    """How many tokens an encoder beside the decoder has; None if there is none."""

    @property
    def mm_items(self) -> Sequence[MultimodalItem]:
        """The items, those of one kind in the order of the prompt."""
        ...


class SglangRequest(Protocol):
    """A request of SGLang's."""

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


class Room(Protocol):
    """What SGLang can still give away in one pass, beside what it has promised."""

    @property
    def remaining_total(self) -> float:
        """Return how many tokens of full attention."""
        ...

    @property
    def remaining_swa(self) -> float:
        """Return how many tokens of windows; 0 for a model without."""
        ...


class PagedAllocator(Protocol):
    """Gives slots of one pool away, page by page."""

    def available_size(self) -> int: ...

    def alloc(self, need_size: int) -> torch.Tensor | None: ...

    def free(self, free_index: torch.Tensor) -> None: ...


class WindowAllocator(Protocol):
    """Gives slots of two pools away: full attention's, and the windows' beside some of them."""

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
    """The requests that run, and the slots of the states that they and the tree have."""

    enable_mamba_extra_buffer: bool
    mamba_ping_pong_track_buffer_size: int

    @property
    def mamba_allocator(self) -> PagedAllocator: ...

    def get_mamba_ping_pong_other_idx(self, mamba_next_track_idx: Any) -> Any: ...


class KvBuffers(Protocol):
    """The tensors of keys and values, one for each layer."""

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    layout: Any


class MhaBuffers(Protocol):
    """How the tensors of an attention pool look."""

    buffers: KvBuffers
    page_size: int
    head_num: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scales: object | None


class LatentBuffers(Protocol):
    """How the tensors of a pool of latent attention look."""

    buffers: object
    """A tuple of one tensor [tokens, 1, elements] for each layer, or an object with other ones."""
    device_layer_num: int
    page_size: int
    kv_cache_dim: int
    dtype: torch.dtype
    scales: object | None


class StateBuffers(Protocol):
    """The tensors of a pool of states, each [layers, slots, ...]."""

    conv: Sequence[torch.Tensor]
    temporal: torch.Tensor
    extra_checkpoint_buffers: Sequence[object]


class Batch(Protocol):
    """What one forward pass computes."""

    reqs: Sequence[SglangRequest]
    forward_mode: Any
