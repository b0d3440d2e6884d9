"""A store as one model uses it: opened only if it has the model's pages in these layouts, or none."""

import time
from collections.abc import Mapping, Sequence

from ...page_format.page_layout import PageLayout
from ..base import StorageBackend
from ..records.manifest import claim_model
from ..uri import telling_no_secrets, without_secrets
from .base import Wrapper

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
        store: str = "",
    ) -> None:
        super().__init__(backend)
        self._model = model
        self._weights_version = weights_version
        self._layouts = layouts
        self._uri = store

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Open the store; refuse it by name if it has this model in other layouts."""
        with telling_no_secrets(self._uri):
            await self.behind.open(memory)
        try:
            deadline = time.monotonic() + CLAIM_TIMEOUT_S
            await claim_model(
                self.behind,
                self._model,
                self._weights_version,
                self._layouts,
                deadline,
                store=without_secrets(self._uri),
            )
        except BaseException:
            await self.behind.close()
            raise
