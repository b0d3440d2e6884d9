"""The items of an SGLang request's prompt, by what the model reads of them.

SGLang puts ids that follow from a hash of 64 bits in the place of an item's placeholders, and takes
that hash from a client that gives one. So an item's content is read here, and its ids in keys follow
from that.
"""

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...ranks.replica.tree.tokens import TOKEN_BYTES, as_token_bytes
from ..items import Item, Items, OncePerObject, content_digest, item_ids
from .engine.contract import MultimodalInputs, MultimodalItem, SglangRequest

TEXT_IDS = 1_000_000
"""The ids of text are below this (SGLang's `MM_PAD_SHIFT_VALUE`), and those in the place of items are
not."""

PLACEHOLDER = -1
"""The id in keys of a placeholder that stands for no part of a digest."""


Tokens: TypeAlias = npt.NDArray[np.int64]
"""A request's tokens as SGLang has them."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptItems:
    """The items of a prompt, and its ids in keys."""

    items: Items = ()
    head: bytes = b""
    """The first ids of the prompt, as int32, up to the last placeholder."""
    padded: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """SGLang's tokens of these."""
    in_ids: bool = True
    """Whether the ids stand for the items; else the namespace has to."""

    def ids(self, tokens: Tokens) -> bytes:
        """Return the ids in keys of the first `tokens` of a request."""
        return self.head[: len(tokens) * TOKEN_BYTES] + as_token_bytes(tokens[len(self.padded) :])

    def tokens(self, ids: bytes) -> Tokens:
        """Return SGLang's tokens of the first ids of a request."""
        behind = np.frombuffer(ids, dtype=np.int32)[len(self.padded) :]
        return np.concatenate([self.padded[: len(ids) // TOKEN_BYTES], behind.astype(np.int64)])


TEXT_ALONE = PromptItems()


class PromptsWithItems:
    """Reads the items of requests, each once: SGLang drops their contents when it has computed them."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._known = OncePerObject[PromptItems | None]()

    def of(self, request: SglangRequest) -> PromptItems | None:
        """Return the items of a request; None if what one of them holds is not known here."""
        inputs = request.multimodal_inputs
        if inputs is None:
            return TEXT_ALONE
        return self._known.get(inputs, lambda: self._read(request, inputs))

    def _read(self, request: SglangRequest, inputs: MultimodalInputs) -> PromptItems | None:
        items: list[Item] = []
        ids = np.array(request.origin_input_ids, dtype=np.int64)
        for each in inputs.mm_items:
            content = _content(each)
            padding = [id_ for id_ in each.pad_values or (each.pad_value,) if id_ is not None]
            for part, (start, last) in enumerate(each.offsets or ()):
                end = last + 1
                if content is None or not np.isin(ids[start:end], padding).all() or end > len(ids):
                    return None
                digest = sha256(content + part.to_bytes(8, "little")).digest()
                items.append(Item(each.hash, start, end, digest))
        padded = ids[: max((item.end for item in items), default=0)].copy()
        for item in items:
            ids[item.start : item.end] = PLACEHOLDER
        # Those of an encoder beside the decoder are not among the tokens.
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
