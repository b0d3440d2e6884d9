"""Early loads: what has come of a prompt goes on to the device while the rest of it is computed.

Without them all of a long prompt is copied to the device after its last page has come.
"""

from typing import TYPE_CHECKING

from ..replica.answers import Wait
from ..replica.requests import LoadState

if TYPE_CHECKING:
    from ..cache import Cache
    from .departures import TokenArray

_EARLY = "\x00early"
"""Behind the name of a request: the name under which its first part is loaded."""


class EarlyLoads:
    """Lets the first parts of requests be cached on the device; `Arrivals` drives it.

    They are held while they are copied and no longer: whoever needs the room takes it, and what has
    left the device again is loaded when the request is admitted. Where the device has no room at once,
    nothing is loaded early. Every rank does the same in the same step.
    """

    def __init__(self, cache: "Cache") -> None:
        self._cache = cache
        prefixes = cache.inspection.prefixes
        self._tokens_max = prefixes.device_least * prefixes.tree.page_tokens
        # With windows or states the first part of a prompt is nothing that could be gone on with.
        self._does_load = all(each.span is None for each in prefixes.components)
        self._loading: dict[str, tuple[TokenArray, str] | None] = {}
        """Requests of which a part is on its way, with what has come since and is to be loaded next."""

    def came(self, request: str, tokens: "TokenArray", namespace: str) -> None:
        """Load what has come of a request."""
        if request in self._loading:
            self._loading[request] = tokens, namespace
        elif self._does_load and len(tokens) <= self._tokens_max:
            self._loading[request] = None
            if isinstance(self._cache.load_back(request + _EARLY, tokens, namespace), Wait):
                self.forget(request)

    def step(self) -> None:
        """Let go of what is on the device, and load what has come since."""
        for request, following in list(self._loading.items()):
            if self._cache.load_state(request + _EARLY) is LoadState.LOADING:
                continue
            self.forget(request)
            if following is not None:
                self.came(request, *following)

    def forget(self, request: str) -> None:
        """Hold nothing for a request any more; what is on its way to the device still comes."""
        if request in self._loading:
            del self._loading[request]
            self._cache.abort(request + _EARLY)
