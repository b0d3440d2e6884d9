"""The weights that vLLM computes with, as a part of namespaces (rule R16).

Pages of a named version stay cached until they are evicted, and match again when the version returns.
Pages of unnamed weights match until the next change, and never go to storage.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from ...ranks.replica.tree.node import NO_PERSIST_PREFIX
from .tracked import TrackedRequest

WEIGHTS_OF_THE_START = "default"
"""vLLM's name for the weights that are loaded at start."""


class WeightsChange(StrEnum):
    """Which calls may change vLLM's weights."""

    WITH_RESET = "with_reset"
    """Weights change with a new name, and with every reset that no new name precedes."""
    WITH_NAME = "with_name"
    """Weights change only with a new name; a reset keeps cached pages."""


class InFlight(StrEnum):
    """Policy for a load in flight when the weights change."""

    KEEP = "keep"
    """The request continues with the loaded pages."""
    COMPUTE = "compute"
    """The load counts as failed, so the request is computed again."""


@dataclass(slots=True)
class WeightsTracker:
    """Tracks which weights the engine has. Every rank calls its methods at the same points."""

    of_the_start: Collection[str] = (WEIGHTS_OF_THE_START,)
    """Names of the weights loaded at start."""
    life: str = ""
    """Identifier of this run of the cache, used only in keys of unnamed weights."""
    change: WeightsChange = WeightsChange.WITH_RESET
    changes: int = 0
    """Number of changes so far; pages from before the last change belong to previous weights."""
    name: str | None = ""
    """Name of the current weights; empty for those loaded at start, None if unknown."""
    placed: Callable[[TrackedRequest], None] | None = None
    """Callback for each request that enters a namespace."""
    _just_named: bool = False
    """Whether the weights were named and since then neither reset nor used."""

    def named(self, version: str) -> bool:
        """Record the name of the weights; return whether the weights have changed."""
        self._just_named = True
        return self._become("" if version in self.of_the_start else version)

    def reset(self) -> bool:
        """Record a reset; return whether the weights may have changed.

        For one change, the engine may be reset before or directly after it gets the new name.
        """
        just_named, self._just_named = self._just_named, False
        return not just_named and self.change is WeightsChange.WITH_RESET and self._become(None)

    def computed(self) -> None:
        """Record that the engine has computed, so that the next reset belongs to another change."""
        self._just_named = False

    def namespace(self, kind: str) -> str:
        """Return the namespace of requests of one kind under the current weights.

        See `TrackedRequest.kind`.
        """
        if self.name == "":
            return kind
        parts: dict[str, object] = json.loads(kind) if kind else {}
        parts["weights"] = self.name or [self.life, self.changes]
        return ("" if self.name else NO_PERSIST_PREFIX) + json.dumps(parts, sort_keys=True)

    def place(self, tracked: TrackedRequest) -> None:
        """Put a request without pages into the namespace of the current weights."""
        tracked.since, tracked.namespace = self.changes, self.namespace(tracked.kind)
        if self.placed is not None:
            self.placed(tracked)

    def _become(self, name: str | None) -> bool:
        if name is not None and name == self.name:
            return False
        self.name = name
        self.changes += 1
        return True
