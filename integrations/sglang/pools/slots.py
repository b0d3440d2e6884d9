"""SGLang's device slots as Lockstep pages: the pages of a prefix, and the pages that a load fills.

A slot has the KV of one token in one of SGLang's device pools; a page's slots are consecutive.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ....ranks.protocol.orders import KV_POOL
from ....ranks.replica.operations.lent import NO_PAGE
from ..engine.contract import PagedAllocator, SglangRequest, WindowAllocator

WINDOW_POOL = "window"

Pages = npt.NDArray[np.int32]

MakeRoom = Callable[[int, int, int], object]
"""Function that evicts from SGLang's tree. Its arguments are the numbers of full-attention tokens,
window tokens and states to evict."""


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """Device slots reserved for a load: neither free, nor in the tree, nor owned by a request."""

    slots: torch.Tensor
    """Full-attention slots, one for each token of the load."""
    window: torch.Tensor | None
    """Window slots, one for each of the load's last tokens; None for a model without windows."""
    pages: Mapping[str, Pages]
    """Maps each pool to page numbers, one for each page of the load. In the window pool, the number is
    -1 for a page before the window."""
    state: torch.Tensor | None = None
    """The slot for the recurrent state after the load's last token; None for a model without states."""


class AttentionSlots:
    """Allocates and frees device slots for loads of a model with full attention only."""

    def __init__(self, allocator: PagedAllocator, page_tokens: int) -> None:
        self._allocator = allocator
        self.page_tokens = page_tokens

    def pages_of(
        self, slots: torch.Tensor, state: torch.Tensor | None = None
    ) -> Mapping[str, Pages]:
        """Return the page numbers of a prefix's whole pages, by pool.

        `slots` has the device slot of each token. `state` is the slot of the recurrent state after
        these tokens, if the model has one.
        """
        del state
        return {KV_POOL: pages(slots, self.page_tokens)}

    def computed(self, request: SglangRequest) -> tuple[int, torch.Tensor | None]:
        """Return (number of tokens of a request that can be saved, slot of the state after them).

        The slot is None for a model without recurrent states.
        """
        return request.kv.kv_committed_len // self.page_tokens * self.page_tokens, None

    def reserve(self, tokens: int, window_tokens: int, make_room: MakeRoom) -> Reserved | None:
        """Allocate slots for a load of `tokens` tokens; return None if too few slots are free.

        The last `window_tokens` of these tokens also get window slots.
        """
        del window_tokens
        short = tokens - self._allocator.available_size()
        if short > 0:
            make_room(short, 0, 0)
        slots = self._allocator.alloc(tokens)
        return None if slots is None else Reserved(slots, None, self.pages_of(slots))

    def give_back(self, reserved: Reserved) -> None:
        """Free the slots of a load that failed."""
        self._allocator.free(reserved.slots)

    def hand_over(self, reserved: Reserved) -> None:
        """Make a load's slots ready for insertion into SGLang's tree, which owns them from then on."""

    def free_state(self, reserved: Reserved) -> None:
        """Free only the slot of a load's recurrent state: SGLang's tree already has this state."""


class WindowSlots(AttentionSlots):
    """Slots of a sliding-window model: the last tokens of a load also get window slots."""

    def __init__(self, allocator: WindowAllocator, page_tokens: int) -> None:
        super().__init__(allocator.full_attn_allocator, page_tokens)
        self._both = allocator

    def pages_of(
        self, slots: torch.Tensor, state: torch.Tensor | None = None
    ) -> Mapping[str, Pages]:
        del state
        first = slots[:: self.page_tokens].to(torch.int64)
        windows = self._both.full_to_swa_index_mapping[first]
        # Leave out slot 0: it is a dummy to which SGLang maps tokens that have left the window.
        found = torch.where(windows > 0, windows // self.page_tokens, NO_PAGE)
        return {**super().pages_of(slots), WINDOW_POOL: found.to(torch.int32).cpu().numpy()}

    def reserve(self, tokens: int, window_tokens: int, make_room: MakeRoom) -> Reserved | None:
        full, windows = self._allocator, self._both.swa_attn_allocator
        short = max(0, tokens - full.available_size())
        window_short = max(0, window_tokens - windows.available_size())
        if short or window_short:
            make_room(short, window_short, 0)
        if full.available_size() < tokens or windows.available_size() < window_tokens:
            return None
        slots, window = full.alloc(tokens), windows.alloc(window_tokens)
        assert slots is not None
        assert window is not None
        unit = self.page_tokens
        gap = np.full((tokens - window_tokens) // unit, NO_PAGE, dtype=np.int32)
        return Reserved(
            slots,
            window,
            {KV_POOL: pages(slots, unit), WINDOW_POOL: np.concatenate([gap, pages(window, unit)])},
        )

    def give_back(self, reserved: Reserved) -> None:
        super().give_back(reserved)
        assert reserved.window is not None
        if reserved.window.numel():
            self._both.swa_attn_allocator.free(reserved.window)

    def hand_over(self, reserved: Reserved) -> None:
        """Record in SGLang's allocator which window slot belongs to each full-attention slot."""
        assert reserved.window is not None
        count = reserved.window.numel()
        rest = reserved.slots.numel() - count
        self._both.clear_full_to_swa_mapping(reserved.slots[:rest])
        self._both.set_full_to_swa_mapping(reserved.slots[rest:], reserved.window)


def pages(slots: torch.Tensor, page_tokens: int) -> Pages:
    """Return the page numbers of the pages to which the token slots in `slots` belong."""
    return (slots[::page_tokens] // page_tokens).to(torch.int32).cpu().numpy()
