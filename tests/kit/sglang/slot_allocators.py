"""Allocators of slots as SGLang's are, page by page, which know what each slot is."""

import torch


class SlotAllocator:
    """Gives away the slots of one pool in order; the pages before `first` are nobody's."""

    def __init__(self, pages: int, page_tokens: int, first: int = 1) -> None:
        self._page_tokens, self._first = page_tokens, first
        self.free_pages = list(range(first, first + pages))

    def available_size(self) -> int:
        """Return how many slots are free."""
        return len(self.free_pages) * self._page_tokens

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return slots, or None if there are too few."""
        count = need_size // self._page_tokens
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        slots = torch.arange(self._page_tokens)
        return torch.cat([slots[:0], *(page * self._page_tokens + slots for page in taken)])

    def free(self, free_index: torch.Tensor) -> None:
        """Take slots back; nobody gives a page back twice, nor one that is nobody's."""
        pages = sorted({int(slot) // self._page_tokens for slot in free_index})
        assert min(pages) >= self._first
        assert not {*pages} & {*self.free_pages}
        self.free_pages = sorted([*self.free_pages, *pages])


class WindowedAllocator:
    """Gives away slots of full attention, and of windows beside some of them."""

    def __init__(self, full_pages: int, window_pages: int, page_tokens: int) -> None:
        self.full_attn_allocator = SlotAllocator(full_pages, page_tokens)
        self.swa_attn_allocator = SlotAllocator(window_pages, page_tokens)
        self.full_to_swa_index_mapping = torch.zeros(
            (full_pages + 1) * page_tokens, dtype=torch.int64
        )

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        """Put slots of windows beside those of full attention."""
        self.full_to_swa_index_mapping[full_indices] = swa_indices

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Say of slots that there is no window beside them."""
        self.full_to_swa_index_mapping[full_indices] = 0

    def give(self, tokens: int) -> torch.Tensor:
        """Return slots of full attention with a window beside each."""
        slots = self.full_attn_allocator.alloc(tokens)
        windows = self.swa_attn_allocator.alloc(tokens)
        assert slots is not None
        assert windows is not None
        self.set_full_to_swa_mapping(slots, windows)
        return slots

    def free_windows(self, slots: torch.Tensor) -> None:
        """Take back the windows beside slots, whose request has moved past them."""
        self.swa_attn_allocator.free(self.full_to_swa_index_mapping[slots])
        self.clear_full_to_swa_mapping(slots)
