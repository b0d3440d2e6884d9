"""What the tree's bookkeeping takes for each page that is cached, beside its tokens."""

import gc
import tracemalloc
from typing import TypedDict

from ..ranks.replica.tree.tokens import TOKEN_BYTES
from .cached_prompts import GROUP_NODES, CachedPrompts, TreeShape

RUN_PAGES = 16
PAGE_TOKENS = 4
"""Short, so that a run that fills the tree has `RUN_PAGES` pages; bookkeeping does not depend on it."""
NODES = 4096


class BytesPerPage(TypedDict):
    """Bookkeeping for each page on the device, in runs of `run_pages` pages."""

    with_keys: float
    without_keys: float
    """What a page takes as long as nothing has asked for the page keys."""
    run_pages: int


def bytes_per_page(components: str) -> BytesPerPage:
    """Measure what the allocator hands out for a tree of runs of `RUN_PAGES` pages."""
    shape = TreeShape(nodes=NODES, page_tokens=PAGE_TOKENS, components=components)
    pages = shape.groups * GROUP_NODES * shape.leaf_tokens // PAGE_TOKENS
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        cached = CachedPrompts(shape, spare_tokens=0)
        gc.collect()
        filled, _ = tracemalloc.get_traced_memory()
        tree = cached.cache.inspection.prefixes.tree
        for node in tree.nodes():
            tree.keys(node)
        gc.collect()
        keyed, _ = tracemalloc.get_traced_memory()
        cached.close()
    finally:
        tracemalloc.stop()
    tokens_bytes = pages * PAGE_TOKENS * TOKEN_BYTES
    return BytesPerPage(
        with_keys=round((keyed - before - tokens_bytes) / pages, 1),
        without_keys=round((filled - before - tokens_bytes) / pages, 1),
        run_pages=RUN_PAGES,
    )
