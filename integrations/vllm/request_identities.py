"""Decides which new vLLM requests are cached, and with which page-key ids and namespace."""

import json
import logging
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any, cast

import numpy as np

from ...ranks.group.host_cache import HostCache
from ..adapters import AdapterWeights
from ..items import ItemNames, Items, OncePerObject, RequestItem, content_digest, item_ids
from .adapters import NOT_KNOWN, loaded
from .contract import MultiModalFeature, VllmRequest
from .tracked import TrackedRequest, may_be_cached, namespace_of

_log = logging.getLogger(__name__)

CONTENT_NOT_KNOWN = "of unknown content"
"""Text in the flight recorder for multimodal items whose content this rank cannot digest."""


class RequestIdentities:
    """Decides which new requests are cached. Every rank makes the same calls, from one thread."""

    def __init__(self, cache: HostCache, adapters: AdapterWeights, *, own_embeddings: bool) -> None:
        """`own_embeddings` is False if other engines send multimodal embeddings to this engine.

        Such embeddings are identified only by names, so requests with multimodal items are then not
        cached.
        """
        self._cache = cache
        self._adapters = adapters
        self._own_embeddings = own_embeddings
        self._page_tokens = cache.config.layout.page_tokens
        self._contents = ItemDigests()
        self._names = ItemNames(
            lambda: _log.warning(
                "a client has given one uuid to two items; requests with a uuid of several items are"
                " not cached"
            )
        )
        self._sessions: dict[str, VllmRequest] = {}
        """Maps ids to resumable requests. A client may add multimodal items to a resumable request at
        any time."""
        self._count = 0
        self._warned = False
        """Whether the warning about multimodal items of unknown content was already logged."""

    def track(self, request: VllmRequest) -> TrackedRequest | None:
        """Return the plug-in's state of a new request; None if the request must not be cached."""
        items = self._contents.of(request)
        if items is None:
            self._names.note_unknown(each.identifier for each in request.mm_features)
        else:
            self._names.note(items)
        if request.resumable:
            self._sessions[request.request_id] = request
        if not may_be_cached(request):
            return None
        self._count += 1
        known = items is not None and self._names.trusted(items)
        if request.mm_features:
            found = [each.content.hex() for each in items or ()] if known else [CONTENT_NOT_KNOWN]
            self._cache.digest_facts("items of request", self._count, "are", *found)
        if items is None or (items and not self._own_embeddings):
            self._warn_once()
            return None
        if not known:
            return None
        adapter = None
        if request.lora_request is not None:
            adapter = self._adapters.identify(loaded(request.lora_request))
            # Add the adapter's identity to the state digest, to detect ranks with different adapter
            # files. Leave out the adapter's name, because it may differ between ranks.
            self._cache.digest_facts("adapter of request", self._count, "is", adapter or NOT_KNOWN)
            if adapter is None:
                return None
        return self._tracked(request, adapter, items)

    def computes(self, scheduled: Collection[str]) -> None:
        """Record multimodal items that clients have added to the resumable requests of this pass."""
        for name in self._sessions.keys() & scheduled if self._sessions else ():
            features = self._sessions[name].mm_features
            self._names.note_unknown(each.identifier for each in features)

    def left(self, request: VllmRequest) -> None:
        """Drop a finished resumable request."""
        self._sessions.pop(request.request_id, None)

    def trusted(self, tracked: TrackedRequest) -> bool:
        """Return whether vLLM computes with the adapter and items that the page keys identify."""
        adapter = tracked.request.lora_request
        return (adapter is None or self._adapters.trusted(loaded(adapter))) and (
            not tracked.items or self._names.trusted(tracked.items)
        )

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "requests with images or other items are not cached, because the scheduler cannot"
                " read their content: mm_processor_cache_type is 'shm', embeddings come from other"
                " engines, or the model has an encoder and a decoder"
            )

    def _tracked(self, request: VllmRequest, adapter: str | None, items: Items) -> TrackedRequest:
        ids = None
        if items:
            prompt = np.asarray(request.all_token_ids[: request.num_prompt_tokens], dtype="<i4")
            ids = item_ids(prompt.tobytes(), items, self._page_tokens)
        kind = namespace_of(request, adapter, () if ids else items)
        return TrackedRequest(
            request, self._count, kind, self._page_tokens, items=items, item_ids=ids
        )


class ItemDigests:
    """Digests the contents of multimodal items, once per object in which vLLM stores an item.

    The digest is taken from the processed tensors, because vLLM's identifier may be a client's `uuid`.
    Requests with the same item share one object while vLLM's processor cache has the item.
    """

    def __init__(self) -> None:
        self._known = OncePerObject[bytes | None]()

    def of(self, request: VllmRequest) -> Items | None:
        """Return a request's multimodal items; None if this rank lacks the content of any of them.

        Contents are in another process with `mm_processor_cache_type: shm`. None is also returned for
        an encoder-decoder model, because its items have no position in the prompt.
        """
        items = [self._item(each) for each in request.mm_features]
        known = tuple(each for each in items if each and each.end <= request.num_prompt_tokens)
        return known if len(known) == len(items) else None

    def _item(self, feature: MultiModalFeature) -> RequestItem | None:
        place = feature.mm_position
        held = self._held(feature.data)
        mask = "all" if place.is_embed is None else content_digest(place.is_embed)
        if held is None or mask is None:
            return None
        name = mask if isinstance(mask, str) else mask.hex()
        beside = json.dumps(["vLLM", feature.modality, place.length, name])
        content = sha256(beside.encode() + held).digest()
        return RequestItem(feature.identifier, place.offset, place.offset + place.length, content)

    def _held(self, data: object) -> bytes | None:
        """Return a digest of a multimodal item's data; None if data is missing or incomplete."""
        if not isinstance(data, Mapping):
            return None
        fields = cast("Mapping[str, Any]", data)
        return self._known.get(
            fields, lambda: content_digest({name: each.data for name, each in fields.items()})
        )
