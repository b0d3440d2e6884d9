"""The items of a vLLM request's prompt, by what the model reads of them.

vLLM calls an item by a hash of its content, or by a `uuid` that a client gives, and does not say which.
So its content is read here, from the tensors that its processor has made of it.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, cast

from ..items import Item, Items, OncePerObject, content_digest
from .contract import MultiModalFeature, VllmRequest


class Contents:
    """Digests the contents of items, once for each object in which vLLM keeps one.

    vLLM gives requests with the same item the same object, while it is in its cache of processed items.
    """

    def __init__(self) -> None:
        self._known = OncePerObject[bytes | None]()

    def of(self, request: VllmRequest) -> Items | None:
        """Return the items of a request; None if what one of them holds is not known here.

        It lies elsewhere with `mm_processor_cache_type: shm`. In a model with an encoder and a decoder,
        items have no place in the prompt.
        """
        items = [self._item(each) for each in request.mm_features]
        known = tuple(each for each in items if each and each.end <= request.num_prompt_tokens)
        return known if len(known) == len(items) else None

    def _item(self, feature: MultiModalFeature) -> Item | None:
        place = feature.mm_position
        held = self._held(feature.data)
        mask = "all" if place.is_embed is None else content_digest(place.is_embed)
        if held is None or mask is None:
            return None
        name = mask if isinstance(mask, str) else mask.hex()
        beside = json.dumps(["vLLM", feature.modality, place.length, name])
        content = sha256(beside.encode() + held).digest()
        return Item(feature.identifier, place.offset, place.offset + place.length, content)

    def _held(self, data: object) -> bytes | None:
        """Return a digest of what was processed; None if there is none of it all."""
        if not isinstance(data, Mapping):
            return None
        fields = cast("Mapping[str, Any]", data)
        return self._known.get(
            fields, lambda: content_digest({name: each.data for name, each in fields.items()})
        )
