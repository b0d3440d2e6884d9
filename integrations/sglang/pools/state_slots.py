"""Slots of full attention, and slots of recurrent states: one state stands for all tokens before it.

SGLang keeps a state where a chunk of a prompt has ended or a request has finished, and gives each
request that runs one of its own to compute in. A match ends only where a state is kept, so a load
brings one.
"""

from collections.abc import Mapping

import numpy as np
import torch

from ....ranks.protocol.orders import KV_POOL
from ..engine.contract import PagedAllocator, SglangRequest, StateRows
from .slots import AttentionSlots, MakeRoom, Pages, Reserved

STATE_POOL = "state"


class StateSlots(AttentionSlots):
    """Slots of full attention, with one slot for the state after the last of them."""

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
        self.give_state_back(reserved)

    def give_state_back(self, reserved: Reserved) -> None:
        assert reserved.state is not None
        self._rows.mamba_allocator.free(reserved.state)

    def computed(self, request: SglangRequest) -> tuple[int, torch.Tensor | None]:
        """Return how many tokens a request has a state for, and where that is.

        Its own slot holds the state after all that it has computed. Where passes overlap the next one
        may be writing there, so that SGLang tracks the state in slots beside it, now and then.
        """
        kv, rows = request.kv, self._rows
        if not rows.enable_mamba_extra_buffer:
            return kv.kv_committed_len, kv.mamba_pool_idx
        count, at = kv.mamba_last_track_seqlen or 0, kv.mamba_last_track_idx
        if count > kv.kv_committed_len and rows.mamba_ping_pong_track_buffer_size == 2:
            # It has run past the tokens that count; the slot before it has not.
            count, at = kv.mamba_prev_track_seqlen or 0, rows.get_mamba_ping_pong_other_idx(at)
        if not 0 < count <= kv.kv_committed_len or count % self.page_tokens:
            return 0, None
        return count, kv.mamba_ping_pong_track_buffer[at]


def _page(state: torch.Tensor) -> Pages:
    return np.array([int(state)], dtype=np.int32)
