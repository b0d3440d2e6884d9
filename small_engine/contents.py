"""Page bytes that can be verified; they replace the output of a model's forward pass.

The bytes of a page are a function of its key (which covers the whole prefix), pool, column, layer and
*global* KV head. So a group of any TP size can check a page written by another group. This module
derives the page keys itself, so that a fault in the cache's keys shows as wrong bytes.

A recurrent state counts as a page, with a key that covers the tokens that the state has seen.

The bytes of one head of one layer in a page are a sequence of 64-bit words. Each word is a hash of the
word's position and of all values named above, so a flipped bit anywhere is detected.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..page_format.page_layout import DTYPE_BYTES, ColumnShard, ShardLayout
from ..ranks.protocol.orders import KV_POOL
from .request import TokenIds

CONTENTS_SEED = sha256(b"lockstep replay contents").digest()
KEY_BYTES = 32
TOKEN_BYTES = 4
CHUNK_WORDS = 1 << 15
"""Number of words computed at a time (256 KiB), so that the words stay in the CPU cache during several
passes."""

Words = npt.NDArray[np.uint64]

_COUNTER = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_SHIFT_A, _SHIFT_B, _SHIFT_C = np.uint64(30), np.uint64(27), np.uint64(31)
_HALF = np.uint64(32)


class FilledPages(Protocol):
    """The interface that a device pool needs so that its pages can be filled and verified."""

    def column(self, name: str) -> torch.Tensor:
        """Return the column's tensor [layers, pages, heads, page_tokens, elements]."""
        ...


def chain_keys(seed: bytes, tokens: bytes, page_tokens: int) -> list[bytes]:
    """Return the keys of the whole pages of `tokens` (int32 bytes); key[i] covers pages 0 to i."""
    step = page_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    key = seed
    for at in range(0, len(tokens) - step + 1, step):
        key = sha256(key + tokens[at : at + step]).digest()
        keys.append(key)
    return keys


class KeyedTokens:
    """The token ids of a request, and the keys from which the bytes of its pages are derived."""

    def __init__(self, ids: TokenIds, page_tokens: int) -> None:
        self.ids = ids
        self._page_tokens = page_tokens
        self.page_keys = chain_keys(CONTENTS_SEED, ids.tobytes(), page_tokens)

    def state_key(self, position: int) -> bytes:
        """Return the key of the recurrent state after the first `position` tokens."""
        pages, rest = divmod(position, self._page_tokens)
        key = self.page_keys[pages - 1] if pages else CONTENTS_SEED
        if not rest:
            return key
        return sha256(key + self.ids[position - rest : position].tobytes()).digest()


def _mixed(words: Words) -> Words:
    """Hash each word so that every input bit changes many output bits."""
    words = (words ^ (words >> _SHIFT_A)) * _MIX_A
    words = (words ^ (words >> _SHIFT_B)) * _MIX_B
    return words ^ (words >> _SHIFT_C)


class _ColumnContents:
    """The expected bytes of one column's pages on one rank."""

    def __init__(self, pool: str, shard: ColumnShard, page_tokens: int) -> None:
        column = shard.column
        self.name = column.name
        self.layers = shard.layers
        self.heads = shard.heads
        self.strip_bytes = page_tokens * column.elements * DTYPE_BYTES[column.dtype]
        self._strip_words = -(-self.strip_bytes // 8)
        self.page_words = self.layers * self.heads * self._strip_words
        # Do not mix the pool's name into the bytes of full attention, so that pages stored by earlier
        # versions still match.
        salt = column.name if pool == KV_POOL else f"{pool}/{column.name}"
        name = np.uint64(int.from_bytes(sha256(salt.encode()).digest()[:8], "little"))
        first = shard.layer_first
        layers = np.arange(first, first + self.layers, dtype=np.uint64)[:, None] << _HALF
        heads = np.arange(shard.head_first, shard.head_first + shard.heads, dtype=np.uint64)
        self._salts = _mixed(_mixed(layers + heads[None, :] + np.uint64(1)) ^ name)
        self._counters = np.arange(1, self._strip_words + 1, dtype=np.uint64) * _COUNTER

    def expected(self, keys: Words) -> npt.NDArray[np.uint8]:
        """Return the expected bytes of pages, as an array [layers, pages, heads, bytes per head].

        `keys` has one row of four words for each page.
        """
        page = _mixed(_mixed(_mixed(keys[:, 0]) ^ keys[:, 1]) ^ keys[:, 2]) ^ keys[:, 3]
        seeds = _mixed(page[None, :, None] ^ self._salts[:, None, :])
        words = seeds[..., None] + self._counters
        words *= _MIX_A
        words ^= words >> _HALF
        return words.view(np.uint8)[..., : self.strip_bytes]


class PageContents:
    """Fills and verifies the device pages of one pool on one rank."""

    def __init__(self, layout: ShardLayout, pool: str = KV_POOL) -> None:
        self._columns = [
            _ColumnContents(pool, shard, layout.page_tokens) for shard in layout.columns
        ]
        words = max(column.page_words for column in self._columns)
        self._chunk_pages = max(1, CHUNK_WORDS // words)

    def fill(self, pool: FilledPages, pages: npt.NDArray[np.int32], keys: Sequence[bytes]) -> None:
        """Write the bytes derived from `keys[i]` into the device page `pages[i]`, for each i.

        Takes the place of the model's forward pass.
        """
        for part, some_keys in self._chunks(pages, keys):
            for column in self._columns:
                tensor = _as_strips(pool.column(column.name))
                tensor[:, part.to(tensor.device)] = torch.from_numpy(column.expected(some_keys)).to(
                    tensor.device
                )

    def verify(self, pool: FilledPages, pages: npt.NDArray[np.int32], keys: Sequence[bytes]) -> int:
        """Return how many device pages differ from the bytes that are derived from their keys."""
        bad = 0
        for part, some_keys in self._chunks(pages, keys):
            wrong = np.zeros(len(some_keys), dtype=np.bool_)
            for column in self._columns:
                tensor = _as_strips(pool.column(column.name))
                held = tensor[:, part.to(tensor.device)].cpu().numpy()
                wrong |= (held != column.expected(some_keys)).any(axis=(0, 2, 3))
            bad += int(wrong.sum())
        return bad

    def _chunks(
        self, pages: npt.NDArray[np.int32], keys: Sequence[bytes]
    ) -> Iterator[tuple[torch.Tensor, Words]]:
        """Yield (page numbers, keys as rows of 64-bit words), a few pages at a time."""
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages were given with {len(keys)} keys")
        words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, KEY_BYTES // 8)
        indices = torch.from_numpy(pages.astype(np.int64))
        for at in range(0, len(keys), self._chunk_pages):
            yield indices[at : at + self._chunk_pages], words[at : at + self._chunk_pages]


def _as_strips(column: torch.Tensor) -> torch.Tensor:
    """Return a view of the column as bytes [layers, pages, heads, bytes of a head]."""
    layers, pages, heads = column.shape[:3]
    return column.view(torch.uint8).view(layers, pages, heads, -1)
