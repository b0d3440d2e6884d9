"""Device slots of a model with full attention and recurrent states; a state covers a whole prefix.

SGLang keeps a state in its tree at the end of each prompt chunk and of each finished request. A running
request has another slot for its working state. A prefix can be restored only where a state is kept, so
every load includes a state.
"""

from collections.abc import Mapping

import numpy as np
import torch

from ....ranks.protocol.orders import KV_POOL
from ..engine.contract import PagedAllocator, SglangRequest, StateRows
from .slots import AttentionSlots, MakeRoom, Pages, Reserved

STATE_POOL = "state"


class StateSlots(AttentionSlots):
    """Slots of a model with recurrent states: a load also gets a slot for the state at its end."""

    def __init__(self, allocator: PagedAllocator, rows: StateRows, page_tokens: int) -> None:
        super().__init__(allocator, page_tokens)
        self._rows = rows

    def pages_of(
        self, slots: torch.Tensor, state: torch.Tensor | None = None
    ) -> Mapping[str, Pages]:
        found = super().pages_of(slots)
        return found if state is None else {**found, STATE_POOL: _page(state)}

    def reserve(self, tokens: int, window_tokens: int, make_room: MakeRoom) -> Reserved | None:
        states = self._rows.mamba_allocator
        state = states.alloc(1)
        if state is None:
            make_room(0, 0, 1)
            state = states.alloc(1)
        if state is None:
            return None
        reserved = super().reserve(tokens, window_tokens, make_room)
        if reserved is None:
            states.free(state)
            return None
        pages = {KV_POOL: reserved.pages[KV_POOL], STATE_POOL: _page(state)}
        return Reserved(reserved.slots, None, pages, state)

    def give_back(self, reserved: Reserved) -> None:
        super().give_back(reserved)
        self.free_state(reserved)

    def free_state(self, reserved: Reserved) -> None:
        assert reserved.state is not None
        self._rows.mamba_allocator.free(reserved.state)

    def computed(self, request: SglangRequest) -> tuple[int, torch.Tensor | None]:
        """Return (number of tokens that a valid state of the request covers, slot of this state).

        The slot of the request's working state has the state after all computed tokens. If SGLang
        overlaps forward passes, the next pass may already be writing to this slot. SGLang then copies
        the state to other slots at intervals, and this method returns the slot of the last copy.
        """
        kv, rows = request.kv, self._rows
        if not rows.enable_mamba_extra_buffer:
            return kv.kv_committed_len, kv.mamba_pool_idx
        count, at = kv.mamba_last_track_seqlen or 0, kv.mamba_last_track_idx
        if count > kv.kv_committed_len and rows.mamba_ping_pong_track_buffer_size == 2:
            # Use the second-last copy of the state, because the last copy covers tokens that are not
            # committed yet.
            count, at = kv.mamba_prev_track_seqlen or 0, rows.get_mamba_ping_pong_other_idx(at)
        if not 0 < count <= kv.kv_committed_len or count % self.page_tokens:
            return 0, None
        return count, kv.mamba_ping_pong_track_buffer[at]


def _page(state: torch.Tensor) -> Pages:
    return np.array([int(state)], dtype=np.int32)
