"""A store as one model uses it: opened only if it has the model's pages in these layouts, or none."""

import logging
import time
from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from ...page_format.page_layout import PageLayout
from ...ranks.protocol.orders import KV_POOL
from ..base import StorageBackend
from ..records.manifest import claim_model
from ..uri import telling_no_secrets, without_secrets
from .base import Wrapper

_log = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 30.0
"""How long the store may take to say which layouts it has."""


class ClaimedBackend(Wrapper):
    """Another backend, which `open` also claims for a model; see `StorageBackend`.

    `store` is its URI; no error of opening it tells the URI's secrets.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        model: str,
        weights_version: str,
        layouts: Mapping[str, PageLayout],
        weights: str = "",
        store: str = "",
    ) -> None:
        """If the store has the `weights` in pages of another layout, a warning says so."""
        super().__init__(backend)
        self._model = model
        self._weights_version = weights_version
        self._layouts = layouts
        self._weights = weights
        self._uri = store

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Open the store; refuse it by name if it has this model in other layouts."""
        with telling_no_secrets(self._uri):
            await self.behind.open(memory)
        try:
            await self._claim(self._weights_version, self._layouts)
            if self._weights:
                await self._claim_weights()
        except BaseException:
            await self.behind.close()
            raise

    async def _claim_weights(self) -> None:
        try:
            await self._claim(self._weights, {KV_POOL: self._layouts[KV_POOL]})
        except ConfigError as error:
            # Both may use one store; what one has is missing for the other.
            _log.warning("store %s: %s: none of those is found", without_secrets(self._uri), error)

    async def _claim(self, version: str, layouts: Mapping[str, PageLayout]) -> None:
        deadline, store = time.monotonic() + CLAIM_TIMEOUT_S, without_secrets(self._uri)
        await claim_model(self.behind, self._model, version, layouts, deadline, store=store)
