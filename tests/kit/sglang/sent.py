"""Substitutes for SGLang's requests and batches, with the attributes that the plug-in uses."""

from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any

import torch

from lockstep.integrations.sglang.engine.contract import KvRow, MultimodalInputs, SglangRequest


@dataclass
class Row:
    """A request's row in SGLang's request table, its number of computed tokens, and its state slots."""

    req_pool_idx: Any = 0
    kv_committed_len: int = 0
    mamba_pool_idx: torch.Tensor | None = None
    mamba_ping_pong_track_buffer: Any = None
    mamba_last_track_idx: Any = None
    mamba_last_track_seqlen: int | None = None
    mamba_prev_track_seqlen: int | None = None


class Modality(Enum):
    """Types of multimodal inputs."""

    IMAGE = 1
    AUDIO = 2


class Format(Enum):
    """Formats of preprocessed multimodal inputs."""

    NORMAL = 1


@dataclass
class SentItem:
    """An image or audio input; `hash` is the identity that SGLang or the client has assigned."""

    hash: int | None
    offsets: Sequence[tuple[int, int]] | None
    feature: object | None
    modality: Enum = Modality.IMAGE
    format: Enum = Format.NORMAL
    precomputed_embeddings: object | None = None
    model_specific_data: dict[str, object] = field(default_factory=dict[str, object])
    pad_value: int | None = None
    pad_values: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.hash is not None:
            self.pad_values = [1_000_000 + (self.hash << 40) + each for each in range(4)]
            self.pad_value = self.pad_values[0]

    def pad(self, tokens: Sequence[int]) -> list[int]:
        """Replace the placeholder tokens of this input by the input's ids, as SGLang does."""
        padded, values = [*tokens], self.pad_values or ()
        for start, last in self.offsets or ():
            for at in range(start, min(last + 1, len(padded))):
                padded[at] = values[(at - start) % len(values)]
        return padded


@dataclass
class SentItems:
    mm_items: list[SentItem]
    num_image_tokens: int | None = None


@dataclass
class Sent:
    """A request with SGLang's attributes, whose handle is the request's name."""

    rid: str = "r"
    prompt: InitVar[Sequence[int]] = ()
    output: InitVar[Sequence[int]] = ()
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    kv: KvRow = field(default_factory=Row)
    last_node: Any = 0
    prefix_len: int = 0
    extend_end: int | None = None
    sampling_params: Any = None
    multimodal_inputs: MultimodalInputs | None = None
    input_embeds: object | None = None
    positional_embed_overrides: object | None = None
    cache_request_handle: Any = field(init=False)
    origin_input_ids: "array[int]" = field(init=False)
    output_ids: "array[int]" = field(init=False)
    full_untruncated_fill_ids: "array[int]" = field(init=False)

    def __post_init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.cache_request_handle = self.rid
        self.origin_input_ids, self.output_ids = array("q", prompt), array("q", output)
        self.full_untruncated_fill_ids = array("q", [*prompt, *output])

    def finished(self) -> bool:
        return False


@dataclass
class Mode:
    """The forward mode of a batch."""

    name: str

    def is_extend(self) -> bool:
        return self.name != "DECODE"


@dataclass
class Computed:
    reqs: Sequence[SglangRequest]
    forward_mode: Any = field(default_factory=lambda: Mode("EXTEND"))
