"""The past with which `generate()` computes: one sequence's keys and values in preallocated memory.

Each layer has one contiguous block of memory for a whole sequence, divided into pages. Attention reads
the same memory that is copied to and from the host. The model gets inputs that are bit-identical to
those from `DynamicCache`.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...errors import UsageError


class PagedLayer(DynamicLayer):
    """One layer's keys and values, [1, heads, tokens, elements], in preallocated device memory.

    A layer with a window returns the same tensors as `DynamicSlidingWindowLayer`. The layer also keeps
    tokens before the window, so that their pages can be copied.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.memory = self._lent = keys, values
        """(keys, values): the tensors with the sequence's KV; position 0 is the sequence's first token.
        """
        self._window = window
        self.set_length(0)

    def set_length(self, length: int) -> None:
        """Record that the memory has valid KV of the sequence's first `length` tokens."""
        self.length = length
        first, (keys, values) = self._first_seen(), self.memory
        self.keys, self.values = keys[:, :, first:length], values[:, :, first:length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the KV of new tokens; return the keys and values to which the new tokens attend."""
        first, start = self._first_seen(), self.length
        end = start + key_states.shape[-2]
        self._make_room(end)
        _write(self.memory, (key_states, value_states), start)
        if self.memory is not self._lent:
            _write(self._lent, (key_states, value_states), start)
        self.set_length(end)
        keys, values = self.memory
        return keys[:, :, first:end], values[:, :, first:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, position of the first key) that `query_length` new tokens read."""
        first = self._first_seen()
        return self.length - first + query_length, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self._window or -1

    def _first_seen(self) -> int:
        # The first new token reads `_window` - 1 earlier tokens, because its window includes the token
        # itself.
        return 0 if self._window is None else max(0, self.length - self._window + 1)

    def _make_room(self, end: int) -> None:
        """Move to newly allocated memory for `2 * end` tokens if `end` tokens exceed the memory.

        After the move, tokens that fit into the preallocated memory are written to both memories,
        because copies read only the preallocated memory.
        """
        old = self.memory
        if end > old[0].shape[2]:
            keys, values = (
                each.new_empty((1, each.shape[1], 2 * end, each.shape[3])) for each in old
            )
            self.memory = keys, values
            _write(self.memory, [each[:, :, : self.length] for each in old], 0)


def _write(memory: Sequence[torch.Tensor], states: Sequence[torch.Tensor], start: int) -> None:
    """Write keys and values at positions from `start` on, except those beyond the memory's end."""
    for mine, each in zip(memory, states, strict=True):
        room = mine[:, :, start : start + each.shape[2]]
        room.copy_(each.detach()[:, :, : room.shape[2]])


class ReusedPast(DynamicCache):
    """The past of one sequence; users pass it to `generate()` as `past_key_values`.

    Valid only within its `with` block of `LockstepCache.reuse`, because the next sequence uses the same
    memory.
    """

    def __init__(self, layers: list[PagedLayer], reused_tokens: int) -> None:
        Cache.__init__(self, layers=layers)
        self.paged = layers
        self.reused_tokens = reused_tokens
        """Number of prompt tokens whose KV was restored; they need not be computed."""
        self.over = False

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `UsageError`: after a rollback, Transformers would compute the whole prompt again."""
        raise UsageError(
            f"{abs(tokens_to_remove)} tokens are to be removed, as assisted decoding does;"
            " Transformers does not support this with a past, so generate without one"
        )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.over:
            raise UsageError(
                "this past was used after its block of `reuse`; another sequence uses its memory now"
            )
        return self.paged[layer_idx].update(key_states, value_states)
