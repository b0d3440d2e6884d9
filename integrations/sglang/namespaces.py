"""Namespaces of SGLang requests; they separate requests with equal tokens but different KV."""

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
    "not known on this rank: its files could not be read or have changed (see this rank's log);"
    " a version in adapter_versions avoids reading them"
)
"""Text in the flight recorder for an adapter that this rank cannot identify."""


class Identifies(Protocol):
    """Identifies LoRA adapters by their weights; see `Adapters`."""

    def identify(self, lora_id: str) -> str | None: ...
    def look(self) -> Collection[str | None]: ...


class Namespaces:
    """Returns the namespace of each request, for the current weights.

    Every rank makes the same calls in the same order. A namespace contains the name of the weights,
    so KV of other weights does not match until those weights are loaded again. `weights.py` describes
    the rules for weights without a name.
    """

    def __init__(self, host: HostCache, adapters: Identifies, *, page_tokens: int = 1) -> None:
        self._host = host
        self._adapters = adapters
        self._items = PromptsWithItems(page_tokens)
        self.names = ItemNames(
            lambda: _log.warning(
                "a client has sent one hash for two different items; requests with such a hash are"
                " not cached on the host"
            )
        )
        """Detects hashes that SGLang uses for multimodal items of different content."""
        self._warned = False
        """Whether the warning about multimodal items of unknown content was already logged."""
        self.weights = ""
        """Name of the weights since the last weight update; empty while the engine has its startup
        weights."""
        self.cleared = ""
        """A part of all namespaces; each call of `clear` changes this part. Empty before the first
        call."""

    def look(self) -> None:
        """Identify adapters loaded since the last call, and compare their identities across ranks.

        Every rank calls it at the same point.
        """
        found = [adapter or NOT_KNOWN for adapter in self._adapters.look()]
        if found:
            self._host.digest_facts("adapters are", *found)

    def items_of(self, request: SglangRequest) -> PromptItems | None:
        """Return a request's multimodal items and record their hashes; None if contents are unknown."""
        found = self._items.of(request)
        if found is not None:
            self.names.note(found.items)
        elif request.multimodal_inputs is not None:
            self.names.note_unknown(each.hash for each in request.multimodal_inputs.mm_items)
        return found

    def of(self, request: SglangRequest) -> str | None:
        """Return a request's namespace; None if the request must not be cached."""
        if request.input_embeds is not None or request.positional_embed_overrides is not None:
            # Do not cache requests with input embeddings, because token ids do not identify their KV.
            return None
        found = self.items_of(request)
        known = found is not None and self.names.trusted(found.items)
        if request.multimodal_inputs is not None:
            contents = [each.content.hex() for each in found.items] if known and found else []
            self._host.digest_facts("items of a request are", *contents or ["unknown"])
        if found is None and not self._warned:
            self._warned = True
            _log.warning(
                "requests with images or other items are not cached on the host if this rank lacks"
                " the items' encoder input or cannot identify their tokens"
            )
        if found is None or not known:
            return None
        parts: dict[str, object] = {"weights": self.weights, "cleared": self.cleared}
        parts["items"] = [] if found.in_ids else named_by_content(found.items)
        if request.lora_id is not None:
            adapter = self._adapters.identify(request.lora_id)
            # Add the adapter's identity to the state digest, so that the next round detects ranks with
            # different adapter files.
            self._host.digest_facts("adapter of a request is", adapter or NOT_KNOWN)
            if adapter is None:
                return None
            parts[ADAPTER] = adapter
        parts["extra"] = without_adapter(request.extra_key, request.lora_id)
        parts[SALT] = request.cache_salt or ""
        return namespace_of_parts(parts)
