"""Paged slot allocators with SGLang's interface that fail on a wrong free."""

import torch


class SlotAllocator:
    """Allocates the slots of one pool; page numbers start at `first`."""

    def __init__(self, pages: int, page_tokens: int, first: int = 1) -> None:
        self._page_tokens, self._first = page_tokens, first
        self.free_pages = list(range(first, first + pages))

    def available_size(self) -> int:
        return len(self.free_pages) * self._page_tokens

    def alloc(self, need_size: int) -> torch.Tensor | None:
        count = need_size // self._page_tokens
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        slots = torch.arange(self._page_tokens)
        return torch.cat([slots[:0], *(page * self._page_tokens + slots for page in taken)])

    def free(self, free_index: torch.Tensor) -> None:
        """Free slots. Fails if a page is already free or has a number below the pool's first page."""
        pages = sorted({int(slot) // self._page_tokens for slot in free_index})
        assert min(pages) >= self._first
        assert not {*pages} & {*self.free_pages}
        self.free_pages = sorted([*self.free_pages, *pages])


class WindowedAllocator:
    """Allocates full-attention slots, each with a window slot that can be freed earlier."""

    def __init__(self, full_pages: int, window_pages: int, page_tokens: int) -> None:
        self.full_attn_allocator = SlotAllocator(full_pages, page_tokens)
        self.swa_attn_allocator = SlotAllocator(window_pages, page_tokens)
        self.full_to_swa_index_mapping = torch.zeros(
            (full_pages + 1) * page_tokens, dtype=torch.int64
        )

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        self.full_to_swa_index_mapping[full_indices] = swa_indices

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        self.full_to_swa_index_mapping[full_indices] = 0

    def give(self, tokens: int) -> torch.Tensor:
        """Allocate full-attention slots, each with a window slot."""
        slots = self.full_attn_allocator.alloc(tokens)
        windows = self.swa_attn_allocator.alloc(tokens)
        assert slots is not None
        assert windows is not None
        self.set_full_to_swa_mapping(slots, windows)
        return slots

    def free_windows(self, slots: torch.Tensor) -> None:
        """Free the window slots of full-attention slots whose tokens are outside the window."""
        self.swa_attn_allocator.free(self.full_to_swa_index_mapping[slots])
        self.clear_full_to_swa_mapping(slots)
