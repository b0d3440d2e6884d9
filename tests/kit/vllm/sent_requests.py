"""Requests and schedules with the attributes of vLLM's, for tests without vLLM."""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.integrations.vllm.contract import BlockState


@dataclass
class Position:
    """The position of a multimodal input in the prompt."""

    offset: int
    length: int
    is_embed: torch.Tensor | None = None


@dataclass
class Processed:
    """One input tensor of a multimodal input."""

    data: object


class Content(UserDict[str, Processed]):
    """The model's input tensors for one multimodal input, by name."""

    @classmethod
    def of(cls, **held: object) -> "Content":
        return cls({name: Processed(each) for name, each in held.items()})


@dataclass
class Item:
    """A multimodal input. By default its content is derived from its identifier."""

    identifier: str
    mm_position: Position
    data: object | None = None
    modality: str = "image"

    def __post_init__(self) -> None:
        if self.data is None:
            self.data = Content.of(pixels=torch.tensor([*self.identifier.encode()]))


@dataclass
class Adapter:
    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    is_3d_lora_weight: bool = False


class Status(Enum):
    RUNNING = 1
    FINISHED_ABORTED = 2


@dataclass
class Sent:
    """A request with the attributes of vLLM's."""

    all_token_ids: list[int] = field(default_factory=list[int])
    request_id: str = "r"
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    prompt_embeds: object | None = None
    cache_salt: str | None = None
    lora_request: Adapter | None = None
    mm_features: list[Item] = field(default_factory=list[Item])
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    status: Status = Status.RUNNING
    kv_transfer_params: object = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of all tokens, because these requests have no output tokens."""
        return len(self.all_token_ids)


@dataclass
class Blocks:
    """Maps the name of each scheduled request to the request's block table."""

    resolve_block_ids: Callable[[str], tuple[Sequence[int], ...]]


@dataclass
class CountedBlocks:
    """A pool of blocks that counts the connector's references. A block is represented by its number."""

    users: dict[int, int] = field(default_factory=dict[int, int])
    blocks: Sequence[int] = range(1000)
    cached_block_hash_to_block: Mapping[str, int] = field(default_factory=dict[str, int])
    watched: dict[int, Callable[[Any], None]] = field(
        default_factory=dict[int, Callable[[Any], None]]
    )

    def touch(self, blocks: Sequence[int]) -> None:
        """Increment the refcounts of blocks."""
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Decrement the refcounts of blocks."""
        for block in blocks:
            self.users[block] -= 1

    def unpin_blocks(self, blocks: Sequence[int], on_reuse: Callable[[Any], None]) -> None:
        """Decrement refcounts of blocks. A later allocation of such a block calls `on_reuse`."""
        self.free_blocks(blocks)
        self.watched |= dict.fromkeys(blocks, on_reuse)

    def hand_out(self, *blocks: int) -> None:
        """Allocate these blocks to another request. Call each block's `on_reuse` callback, if any."""
        for block in blocks:
            on_reuse = self.watched.pop(block, None)
            if on_reuse is not None:
                on_reuse(SimpleNamespace(block_id=block))


@dataclass
class Scheduled:
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    preempted_req_ids: AbstractSet[str] | None = None
    kv_connector_block_state: BlockState | None = None
    total_num_scheduled_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())
