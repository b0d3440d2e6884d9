"""Multimodal items of an SGLang request's prompt, identified by the data that the model reads.

SGLang replaces an item's placeholders by token ids derived from a 64-bit hash, which a client may
supply. Lockstep therefore hashes the item's content itself, and derives the token ids in page keys from
the hash of the content.
"""

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...ranks.replica.tree.tokens import TOKEN_BYTES, as_token_bytes
from ..items import Items, OncePerObject, RequestItem, content_digest, item_ids
from .engine.contract import MultimodalInputs, MultimodalItem, SglangRequest

TEXT_IDS = 1_000_000
"""SGLang's `MM_PAD_SHIFT_VALUE`: ids of text tokens are below it, ids of multimodal items are not."""

PLACEHOLDER = -1
"""The id, in page keys, of placeholder tokens that hold no part of an item's digest."""


Tokens: TypeAlias = npt.NDArray[np.int64]
"""A request's token ids as SGLang has them; those of a multimodal item come from SGLang's hash."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptItems:
    """The multimodal items of a prompt, and the ids that replace its token ids in page keys."""

    items: Items = ()
    head: bytes = b""
    """Page-key ids of the prompt's tokens up to and including the last placeholder, as int32."""
    padded: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """SGLang's token ids for the same positions as `head`."""
    in_ids: bool = True
    """Whether the ids in page keys identify the items' contents. If not, the namespace must identify
    them."""

    def ids(self, tokens: Tokens) -> bytes:
        """Return page-key ids of a request's first tokens, given SGLang's ids of the same tokens."""
        return self.head[: len(tokens) * TOKEN_BYTES] + as_token_bytes(tokens[len(self.padded) :])

    def tokens(self, ids: bytes) -> Tokens:
        """Return SGLang's ids of a request's first tokens, given page-key ids of the same tokens."""
        behind = np.frombuffer(ids, dtype=np.int32)[len(self.padded) :]
        return np.concatenate([self.padded[: len(ids) // TOKEN_BYTES], behind.astype(np.int64)])


TEXT_ALONE = PromptItems()


class PromptsWithItems:
    """Reads each request's multimodal items once, before SGLang drops their contents."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._known = OncePerObject[PromptItems | None]()

    def of(self, request: SglangRequest) -> PromptItems | None:
        """Return a request's multimodal items; None if this rank lacks the content of any of them."""
        inputs = request.multimodal_inputs
        if inputs is None:
            return TEXT_ALONE
        return self._known.get(inputs, lambda: self._read(request, inputs))

    def _read(self, request: SglangRequest, inputs: MultimodalInputs) -> PromptItems | None:
        items: list[RequestItem] = []
        ids = np.array(request.origin_input_ids, dtype=np.int64)
        for each in inputs.mm_items:
            content = _content(each)
            padding = [id_ for id_ in each.pad_values or (each.pad_value,) if id_ is not None]
            for part, (start, last) in enumerate(each.offsets or ()):
                end = last + 1
                if content is None or not np.isin(ids[start:end], padding).all() or end > len(ids):
                    return None
                digest = sha256(content + part.to_bytes(8, "little")).digest()
                items.append(RequestItem(each.hash, start, end, digest))
        padded = ids[: max((item.end for item in items), default=0)].copy()
        for item in items:
            ids[item.start : item.end] = PLACEHOLDER
        # Return None for items of a separate encoder: their tokens are not in the prompt, so their ids
        # are unknown here.
        if inputs.num_image_tokens is not None or ids.max(initial=0) >= TEXT_IDS:
            return None
        if not all(each.offsets for each in inputs.mm_items):
            return None
        head = as_token_bytes(ids[: len(padded)])
        found = item_ids(head, items, self._page_tokens)
        in_ids = found is not None
        return PromptItems(tuple(items), found.of(head) if found else head, padded, in_ids)


def _content(item: MultimodalItem) -> bytes | None:
    if item.feature is None and item.precomputed_embeddings is None:
        return None
    held = {
        "feature": item.feature,
        "precomputed_embeddings": item.precomputed_embeddings,
        **item.model_specific_data,
    }
    digest = content_digest({name: each for name, each in held.items() if each is not None})
    kind = json.dumps(["SGLang", item.modality.name, item.format.name, item.offsets])
    return None if digest is None else sha256(kind.encode() + digest).digest()
