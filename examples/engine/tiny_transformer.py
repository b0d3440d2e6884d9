"""A small Transformer with random weights: grouped-query attention, rotary positions, paged KV.

The model reads and writes keys and values in pages, like the kernels of a real engine, and does not use
the cache's API.

Every factor is a multiple of 2**-12, so each sum of products is exact in float64 and independent of its
order. Outputs are therefore equal for any chunk size and number of ranks. Real engines round, so their
output may change with the chunk or TP size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

GRID = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the whole model, before it is sharded."""

    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    hidden: int = 128
    vocabulary: int = 512
    positions: int = 1024

    @property
    def width(self) -> int:
        """Number of elements of a token's hidden state."""
        return self.heads * self.head_dim


def snap(numbers: torch.Tensor) -> torch.Tensor:
    """Round to multiples of 1/`GRID`. This also removes differences in the last bit of an `exp`."""
    return torch.round(numbers * GRID) / GRID


def normed(numbers: torch.Tensor) -> torch.Tensor:
    """Return the hidden state of each token divided by its root mean square."""
    return snap(numbers / torch.sqrt(numbers.square().mean(-1, keepdim=True) + 1e-6))


class TinyTransformer:
    """One rank's shard of the model: a range of the heads, and of the hidden elements.

    All ranks draw the whole model's weights from one seed and keep their shard, so the output does not
    depend on the number of ranks. `add_up` replaces a tensor by its sum over all ranks.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: int = 0,
        world_size: int = 1,
        add_up: Callable[[torch.Tensor], object] = lambda _: None,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self._add_up = add_up
        random = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int, *, divided: int | None = None) -> torch.Tensor:
            """Draw a random matrix; return it whole, or this rank's part.

            `divided` is the dimension that is sharded over the ranks: 0 for rows, 1 for columns, None
            for neither.
            """
            numbers = torch.randn(rows, columns, generator=random, dtype=torch.float64)
            numbers = snap(numbers / math.sqrt(rows))
            return numbers if divided is None else numbers.chunk(world_size, divided)[rank]

        width, keys = shape.width, shape.kv_heads * shape.head_dim
        self._embedding = weights(shape.vocabulary, width) * math.isqrt(shape.vocabulary)
        self._layers = [
            (
                weights(width, width, divided=1),
                weights(width, keys, divided=1),
                weights(width, keys, divided=1),
                weights(width, width, divided=0),
                weights(width, shape.hidden, divided=1),
                weights(shape.hidden, width, divided=0),
            )
            for _ in range(shape.layers)
        ]
        self._unembedding = weights(width, shape.vocabulary)
        half = shape.head_dim // 2
        turns = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(shape.positions, dtype=torch.float64)[:, None, None] * turns
        self._cos, self._sin = snap(torch.cos(angles)), snap(torch.sin(angles))

    def next_token(
        self,
        tokens: Sequence[int],
        start: int,
        pages: npt.NDArray[np.int32],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> int:
        """Compute `tokens`, starting at position `start`; return the most likely next token.

        `keys` and `values` are columns of pages, [layers, pages, heads, page_tokens, head_dim]. `pages`
        is the request's page table in token order.
        """
        shape, end = self.shape, start + len(tokens)
        table = torch.from_numpy(pages.astype(np.int64))
        at = torch.arange(start, end)
        page, slot = table[at // keys.shape[3]], at % keys.shape[3]
        read = table[: -(-end // keys.shape[3])]
        is_later = torch.arange(end) > at[:, None]
        numbers = self._embedding[torch.tensor(tokens)]
        for layer, (to_q, to_k, to_v, to_out, to_hidden, from_hidden) in enumerate(self._layers):
            inputs = normed(numbers)
            q, k, v = (
                snap(inputs @ matrix).view(len(tokens), -1, shape.head_dim)
                for matrix in (to_q, to_k, to_v)
            )
            keys[layer, page, :, slot] = self._rotated(k, at).to(keys.dtype)
            values[layer, page, :, slot] = v.to(values.dtype)
            # Gather keys and values of the tokens before `end`, as [heads, tokens, head_dim].
            k, v = (
                column[layer, read].transpose(0, 1).flatten(1, 2)[:, :end].double()
                for column in (keys, values)
            )
            # Group queries by KV head, as [KV heads, queries per KV head, tokens, head_dim].
            q = self._rotated(q, at).view(len(tokens), k.shape[0], -1, shape.head_dim)
            q = q.permute(1, 2, 0, 3)
            scores = snap(q @ k[:, None].transpose(2, 3) / math.sqrt(shape.head_dim))
            scores = scores.masked_fill(is_later, -math.inf)
            shares = snap(torch.exp(scores - scores.amax(-1, keepdim=True)))
            seen = snap(shares @ v[:, None] / shares.sum(-1, keepdim=True))
            numbers = self._plus(numbers, seen.permute(2, 0, 1, 3).flatten(1) @ to_out)
            hidden = snap(torch.relu(normed(numbers) @ to_hidden).square())
            numbers = self._plus(numbers, hidden @ from_hidden)
        return int((normed(numbers[-1:]) @ self._unembedding).argmax())

    def alone(self, prompt: Sequence[int], outputs: int) -> list[int]:
        """Return the output tokens for a prompt, computed without a cache in one large page."""
        tokens = list(prompt)
        heads = self._layers[0][1].shape[1] // self.shape.head_dim
        page = (self.shape.layers, 1, heads, len(prompt) + outputs, self.shape.head_dim)
        keys, values = torch.zeros(page), torch.zeros(page)
        start = 0
        for _ in range(outputs):
            token = self.next_token(tokens[start:], start, np.zeros(1, np.int32), keys, values)
            start = len(tokens)
            tokens.append(token)
        return tokens[len(prompt) :]

    def _rotated(self, heads: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Apply rotary positions to queries or keys [tokens, heads, head_dim]."""
        first, second = heads.chunk(2, -1)
        cos, sin = self._cos[at], self._sin[at]
        return snap(torch.cat([first * cos - second * sin, first * sin + second * cos], -1))

    def _plus(self, numbers: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """Return `numbers` plus the sum of `mine` over all ranks."""
        self._add_up(mine)
        return snap(numbers + mine)
