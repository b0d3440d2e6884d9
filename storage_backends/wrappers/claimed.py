"""A wrapper that claims a store for a model; `open` fails if the model has other layouts there."""

import logging
import time
from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from ...page_format.page_layout import PageLayout
from ...ranks.protocol.orders import KV_POOL
from ..base import StorageBackend
from ..records.manifest import claim_model
from ..uri import hiding_secrets, without_secrets
from .base import Wrapper

_log = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 30.0
"""Timeout in seconds for claiming a store: reading and writing its manifests."""


class ClaimedBackend(Wrapper):
    """A wrapper whose `open` also claims the store for a model, that is, for its page layouts.

    A claim writes the model's manifest or compares with it. `store` is the store's URI; errors of
    opening never contain its secrets.
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
        """If `weights` names the weights, `open` warns if the store has another layout for them."""
        super().__init__(backend)
        self._model = model
        self._weights_version = weights_version
        self._layouts = layouts
        self._weights = weights
        self._uri = store

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Open the store and claim it for the model.

        Raises `ConfigError` that names the store if it has pages of this model in other layouts.
        """
        with hiding_secrets(self._uri):
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
            # Only warn, because users with different layouts may share the store: their reads only miss
            # each other's pages.
            _log.warning(
                "store %s: %s (its pages of these weights will miss)",
                without_secrets(self._uri),
                error,
            )

    async def _claim(self, version: str, layouts: Mapping[str, PageLayout]) -> None:
        deadline, store = time.monotonic() + CLAIM_TIMEOUT_S, without_secrets(self._uri)
        await claim_model(self.behind, self._model, version, layouts, deadline, store=store)
