"""What keeps apart requests whose tokens are the same and whose KV is not."""

import json
from collections.abc import Callable

from .contract import SglangRequest

Identify = Callable[[str], str | None]
"""Returns what the weights of an adapter are, by SGLang's id for it; None where that cannot be told."""


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
    """Returns the namespaces of requests, under the weights of now.

    A version of the weights is a part of the namespace, so what was computed with others is not found,
    and is found again when its version comes back.
    """

    def __init__(self, identify: Identify) -> None:
        self._identify = identify
        self.weights = ""
        """The version of the weights since the last update; empty while they are those of the start."""
        self.cleared = ""
        """Names the time since everything was given up; empty before the first time."""

    def of(self, request: SglangRequest) -> str | None:
        """Return a request's namespace; None for one that is not to be cached."""
        if not may_be_cached(request):
            return None
        parts = {"weights": self.weights, "cleared": self.cleared}
        extra = request.extra_key or ""
        if request.lora_id is not None:
            adapter = self._identify(request.lora_id)
            if adapter is None:
                return None
            # SGLang's id for an adapter is made up anew at each start, and ends the extra key.
            extra = extra.removesuffix(request.lora_id)
            parts["adapter"] = adapter
        parts["extra"] = extra
        parts["salt"] = request.cache_salt or ""
        kept = {name: part for name, part in parts.items() if part}
        return json.dumps(kept, sort_keys=True) if kept else ""
