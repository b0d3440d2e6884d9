"""A request of a workload, and the token ids that its block ids stand for.

Token ids are a pure function of where they stand, so that every rank computes the same ones and a
second run meets the same prefixes. Prompt tokens lie below `OUTPUT_TOKENS_FROM` and output tokens at
or above it: no output is ever taken for a prompt.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512
"""Tokens that one hash id of a trace stands for."""
OUTPUT_TOKENS_FROM = 1 << 30
"""Prompt token ids are below this, output token ids are not; both fit int32."""

TokenIds = npt.NDArray[np.int32]

_MASK = np.uint64(OUTPUT_TOKENS_FROM - 1)
_SPREAD_ID = np.uint64(0x9E3779B97F4A7C15)
_SPREAD_OFFSET = np.uint64(0xD1B54A32D192ED03)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HIGH = np.uint64(32)


def _scrambled(ids: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64]) -> TokenIds:
    """Return 30-bit numbers that are a function of id and offset alone; the shapes broadcast."""
    word = ids * _SPREAD_ID + offsets * _SPREAD_OFFSET
    word ^= word >> _HIGH
    word *= _MIX
    word ^= word >> _HIGH
    word *= _MIX
    return ((word >> _HIGH) & _MASK).astype(np.int32)


def block_tokens(hash_ids: tuple[int, ...], tokens: int) -> TokenIds:
    """Return the first `tokens` token ids of the blocks, each of `BLOCK_TOKENS`."""
    used = -(-tokens // BLOCK_TOKENS)
    ids = np.array([each & 0xFFFF_FFFF_FFFF_FFFF for each in hash_ids[:used]], dtype=np.uint64)
    offsets = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    return _scrambled(ids[:, None], offsets[None, :]).reshape(-1)[:tokens]


def output_tokens(request: int, tokens: int) -> TokenIds:
    """Return the token ids that the request numbered `request` generates."""
    index = np.array([request], dtype=np.uint64)
    positions = np.arange(tokens, dtype=np.uint64)
    return _scrambled(index, positions) | np.int32(OUTPUT_TOKENS_FROM)


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload.

    `hash_ids` holds one id for each block of the prompt; requests that share the first n ids share
    the first n blocks. The last block may be partial.
    """

    index: int
    """The request's place in the workload, from 0."""
    prompt_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    namespace: str = ""
    """The namespace within the cache: requests of different ones share nothing."""

    @property
    def name(self) -> str:
        """The name that the cache and the reports have for the request."""
        return f"request-{self.index}"

    @property
    def prompt_tokens(self) -> TokenIds:
        return block_tokens(self.hash_ids, self.prompt_length)
