"""Early loads: what has come of a prompt goes on to the device while the rest of it is computed.

Without them all of a long prompt is copied to the device after its last page has come.
"""

from typing import TYPE_CHECKING, Final

from ..replica.answers import Wait
from ..replica.requests import LoadState
from ..replica.tree.node import DEVICE

if TYPE_CHECKING:
    from ..cache import Cache
    from .departures import TokenArray

_EARLY: Final = "\x00early"
"""Behind the name of a request: the name under which its first part is loaded.

No message may name a request so (`manifest.require_request`).
"""
_SHARE: Final = 2
"""At most one part in so many of the device is for requests that are still on their way in."""
_SPARE: Final = 4
"""One part in so many stays free, or can be evicted, for those that are running."""


class EarlyLoads:
    """Lets the first parts of requests be cached on the device; `Arrivals` drives it.

    They are held while they are copied and no longer: whoever needs the room takes it, and what has
    left the device again is loaded when the request is admitted. They have a part of the device only,
    and leave room for those that run. Every rank does the same in the same step.
    """

    def __init__(self, cache: "Cache") -> None:
        self._cache = cache
        prefixes = cache.inspection.prefixes
        self._prefixes = prefixes
        self._page_tokens = prefixes.tree.page_tokens
        # With windows or states the first part of a prompt is nothing that could be gone on with.
        self._does_load = all(each.span is None for each in prefixes.components)
        self._loading: dict[str, tuple[TokenArray, str] | None] = {}
        """Requests of which a part is on its way, with what has come since and is to be loaded next."""
        self._pages: dict[str, int] = {}
        """How many pages were loaded of each request that is still on its way in."""

    def came(self, request: str, tokens: "TokenArray", namespace: str) -> None:
        """Load what has come of a request, if there is room for it."""
        if request in self._loading:
            self._loading[request] = tokens, namespace
            return
        name, pages = request + _EARLY, len(tokens) // self._page_tokens
        if name in self._cache.inspection.requests or not self._has_room(request, pages):
            return
        self._loading[request] = None
        if isinstance(self._cache.load_back(name, tokens, namespace), Wait):
            self._let_go(request)
        else:
            self._pages[request] = pages

    def step(self) -> None:
        """Let go of what is on the device, and load what has come since."""
        for request, following in list(self._loading.items()):
            if self._cache.load_state(request + _EARLY) is LoadState.LOADING:
                continue
            self._let_go(request)
            if following is not None:
                self.came(request, *following)

    def forget(self, request: str) -> None:
        """Hold nothing for a request any more; what is on its way to the device still comes."""
        self._pages.pop(request, None)
        self._let_go(request)

    def _let_go(self, request: str) -> None:
        if request in self._loading:
            del self._loading[request]
            self._cache.abort(request + _EARLY)

    def _has_room(self, request: str, pages: int) -> bool:
        """Say whether so many pages of a request may be on the device before it is admitted."""
        if not self._does_load:
            return False
        before = self._pages.get(request, 0)
        most = self._prefixes.device_least // _SHARE
        if sum(self._pages.values()) - before + pages > most:
            return False
        spare = self._prefixes.device_least // _SPARE
        residence = self._prefixes.residence
        return all(
            residence.available(DEVICE, each.index) - (pages - before) >= spare
            for each in self._prefixes.components
        )
