"""What keeps apart requests whose tokens are the same and whose KV is not."""

import logging
from collections.abc import Collection
from typing import Protocol

from ...ranks.group.host_cache import HostCache
from ..items import ItemNames, named_by_content
from ..namespaces import ADAPTER, SALT, namespace_of_parts
from .engine.contract import SglangRequest
from .identity.adapters import without_adapter
from .items import PromptItems, PromptsWithItems

_log = logging.getLogger(__name__)

NOT_KNOWN = (
    "not known on this rank, which could not read its files or found them changed, and names it in its"
    " log; a version in adapter_versions avoids reading"
)
"""What the flight recorder says of an adapter whose weights one rank cannot tell."""


class Identifies(Protocol):
    """Tells adapters apart by their weights."""

    def identify(self, lora_id: str) -> str | None: ...
    def look(self) -> Collection[str | None]: ...


class Namespaces:
    """Returns the namespaces of requests, under the weights of now. Every rank asks in the same order.

    A version of the weights is a part of the namespace, so what was computed with others is not found,
    and is found again when its version comes back. `weights.py` says when it is not.
    """

    def __init__(self, host: HostCache, adapters: Identifies, *, page_tokens: int = 1) -> None:
        self._host = host
        self._adapters = adapters
        self._items = PromptsWithItems(page_tokens)
        self.names = ItemNames(
            lambda: _log.warning(
                "a client has given one hash to two items; requests with a hash that stands for"
                " several items stay on the device"
            )
        )
        """The contents that SGLang's hashes of items stand for."""
        self._told = False
        """Whether the log says that items are not known."""
        self.weights = ""
        """The name of the weights since the last update; empty while they are those of the start."""
        self.cleared = ""
        """Names the time since everything was given up; empty before the first time."""

    def look(self) -> None:
        """Read the weights of adapters that were loaded since the last call; every rank calls it."""
        found = [adapter or NOT_KNOWN for adapter in self._adapters.look()]
        if found:
            self._host.witness("adapters are", *found)

    def items_of(self, request: SglangRequest) -> PromptItems | None:
        """Return the items of a request that SGLang is going to compute; None if they are not known."""
        found = self._items.of(request)
        if found is not None:
            self.names.note(found.items)
        elif request.multimodal_inputs is not None:
            self.names.note_unknown(each.hash for each in request.multimodal_inputs.mm_items)
        return found

    def of(self, request: SglangRequest) -> str | None:
        """Return a request's namespace; None for one that is not to be cached."""
        if request.input_embeds is not None or request.positional_embed_overrides is not None:
            # Embeddings in the place of tokens have no ids.
            return None
        found = self.items_of(request)
        known = found is not None and self.names.trusted(found.items)
        if request.multimodal_inputs is not None:
            contents = [each.content.hex() for each in found.items] if known and found else []
            self._host.witness("items of a request are", *contents or ["of unknown content"])
        if found is None and not self._told:
            self._told = True
            _log.warning(
                "requests with images or other items stay on the device where this rank does not have"
                " what its encoder reads of them, or does not know their tokens"
            )
        if found is None or not known:
            return None
        parts: dict[str, object] = {"weights": self.weights, "cleared": self.cleared}
        parts["items"] = [] if found.in_ids else named_by_content(found.items)
        if request.lora_id is not None:
            adapter = self._adapters.identify(request.lora_id)
            # Ranks that have read other files, or could not read them, are told apart by it.
            self._host.witness("adapter of a request is", adapter or NOT_KNOWN)
            if adapter is None:
                return None
            parts[ADAPTER] = adapter
        parts["extra"] = without_adapter(request.extra_key, request.lora_id)
        parts[SALT] = request.cache_salt or ""
        return namespace_of_parts(parts)
