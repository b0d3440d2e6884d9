"""What keeps apart requests whose tokens are the same and whose KV is not."""

from collections.abc import Collection
from typing import Protocol

from ..namespaces import ADAPTER, SALT, namespace_of_parts
from .contract import SglangRequest
from .identity.adapters import without_adapter

NOT_KNOWN = (
    "not known on this rank, which could not read its files or found them changed, and names it in its"
    " log; a version in adapter_versions avoids reading"
)
"""What the flight recorder says of an adapter whose weights one rank cannot tell."""


class Identifies(Protocol):
    """Tells adapters apart by their weights."""

    def identify(self, lora_id: str) -> str | None: ...
    def look(self) -> Collection[str | None]: ...


class Witnessing(Protocol):
    """Compares facts between ranks."""

    def witness(self, *facts: object) -> None: ...


def may_be_cached(request: SglangRequest) -> bool:
    """Say whether a request's tokens, with its namespace, determine its KV.

    Embeddings in the place of tokens have no ids; and the ids that SGLang makes up for pictures stand
    for less than their content.
    """
    return (
        request.multimodal_inputs is None
        and request.input_embeds is None
        and request.positional_embed_overrides is None
    )


class Namespaces:
    """Returns the namespaces of requests, under the weights of now. Every rank asks in the same order.

    A version of the weights is a part of the namespace, so what was computed with others is not found,
    and is found again when its version comes back. `weights.py` says when it is not.
    """

    def __init__(self, host: Witnessing, adapters: Identifies) -> None:
        self._host = host
        self._adapters = adapters
        self.weights = ""
        """The name of the weights since the last update; empty while they are those of the start."""
        self.cleared = ""
        """Names the time since everything was given up; empty before the first time."""

    def look(self) -> None:
        """Read the weights of adapters that were loaded since the last call; every rank calls it."""
        found = [adapter or NOT_KNOWN for adapter in self._adapters.look()]
        if found:
            self._host.witness("adapters are", *found)

    def of(self, request: SglangRequest) -> str | None:
        """Return a request's namespace; None for one that is not to be cached."""
        if not may_be_cached(request):
            return None
        parts = {"weights": self.weights, "cleared": self.cleared}
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
