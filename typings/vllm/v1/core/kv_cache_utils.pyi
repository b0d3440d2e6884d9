from collections.abc import Callable, Iterable, Sequence
from typing import Any

class BlockHash(bytes): ...

def generate_block_hash_extra_keys(
    request: object, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]: ...
def hash_block_tokens(
    hash_function: Callable[[Any], bytes],
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = ...,
) -> BlockHash: ...
def maybe_convert_block_hash(hash_bytes: BlockHash) -> bytes | int: ...
def to_event_extra_keys(
    extra_keys: Iterable[tuple[Any, ...] | None] | None,
) -> list[tuple[Any, ...] | None] | None: ...
