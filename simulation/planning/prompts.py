"""Prompts in which one id represents a whole page, so that a replica can work without tokens.

Two pages have the same id only if they have the same tokens. A replica whose pages have one token each,
and whose tokens are these ids, finds, keeps and evicts the same pages as a replica with all tokens, but
hashes far fewer bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError
from ...small_engine.request import BLOCK_TOKENS, WorkloadRequest

ID_BYTES = 4
"""Size of a page id in bytes; it equals the size of a token, because the replica treats ids as tokens.
"""
_IDS_MAX = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPrompt:
    """A prompt for a replica whose pages have one token: each id represents a page."""

    tokens: int
    """The prompt's length in tokens."""
    ids: bytes
    """The ids of the prompt's whole pages."""
    usable: int
    """Number of pages that can be cache hits; excludes the page of the last token, which is always
    computed."""
    reserved: int
    """Number of device pages that the prompt needs, including a last partial page."""

    @property
    def pages(self) -> int:
        return len(self.ids) // ID_BYTES


def require_page_tokens(page_tokens: int) -> None:
    """Raise `ConfigError` unless a trace's block hashes can identify pages of `page_tokens` tokens."""
    if page_tokens < 1 or (BLOCK_TOKENS % page_tokens and page_tokens % BLOCK_TOKENS):
        raise ConfigError(
            f"pages of {page_tokens} tokens do not fit a trace, whose ids cover {BLOCK_TOKENS}"
            " tokens each; use a divisor or a multiple of that"
        )


def paged(requests: Iterable[WorkloadRequest], page_tokens: int) -> list[PagedPrompt]:
    """Return each request's prompt as page ids."""
    require_page_tokens(page_tokens)
    blocks_a_page = max(1, page_tokens // BLOCK_TOKENS)
    each = max(1, BLOCK_TOKENS // page_tokens)
    offsets = np.arange(each, dtype=np.int64)
    numbers: dict[tuple[int, ...] | int, int] = {}
    prompts: list[PagedPrompt] = []
    for request in requests:
        named: Iterable[tuple[int, ...] | int] = request.hash_ids
        if blocks_a_page > 1:
            at = range(0, len(request.hash_ids), blocks_a_page)
            named = [request.hash_ids[first : first + blocks_a_page] for first in at]
        runs = [numbers.setdefault(name, len(numbers)) for name in named]
        ids = (np.array(runs, dtype=np.int64)[:, None] * each + offsets).reshape(-1)
        whole = request.prompt_length // page_tokens
        prompts.append(
            PagedPrompt(
                tokens=request.prompt_length,
                ids=ids[:whole].astype("<i4").tobytes(),
                usable=(request.prompt_length - 1) // page_tokens,
                reserved=-(-request.prompt_length // page_tokens),
            )
        )
    if len(numbers) * each > _IDS_MAX:
        raise ConfigError(
            f"the trace has {len(numbers) * each:,} different pages of {page_tokens} tokens, but"
            f" at most {_IDS_MAX:,} are supported; use larger pages or fewer requests"
        )
    return prompts
