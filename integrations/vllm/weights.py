"""Tracks vLLM's current weights, so that namespaces separate pages of different weights (rule R16).

Pages of named weights stay cached until they are evicted, and match again if vLLM returns to these
weights. Pages of unnamed weights match until the next change of weights, and never go to storage.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from ...ranks.replica.tree.node import NO_PERSIST_PREFIX
from .tracked import TrackedRequest

WEIGHTS_OF_THE_START = "default"
"""vLLM's name for the weights with which it starts."""


class WeightsChange(StrEnum):
    """Setting: which calls to vLLM may change its weights."""

    WITH_RESET = "with_reset"
    """Weights change when vLLM names new weights, and when vLLM resets its prefix cache. A reset
    directly after a new name is not a second change."""
    WITH_NAME = "with_name"
    """Weights change only when vLLM names new weights. A reset of the prefix cache keeps cached pages.
    """


class InFlight(StrEnum):
    """Setting: what happens to a load in flight when the weights change."""

    KEEP = "keep"
    """The load is kept: the request continues with the loaded pages."""
    COMPUTE = "compute"
    """The load counts as failed, so that the request is computed with the new weights."""


@dataclass(slots=True)
class WeightsTracker:
    """Tracks the engine's current weights. Every rank makes the same calls at the same points."""

    of_the_start: Collection[str] = (WEIGHTS_OF_THE_START,)
    """All names of the weights with which vLLM starts."""
    life: str = ""
    """Identifier of this run of the cache. Only the namespaces of unnamed weights contain it."""
    change: WeightsChange = WeightsChange.WITH_RESET
    changes: int = 0
    """Number of weight changes so far."""
    name: str | None = ""
    """Name of the current weights: "" for the weights of the start, None for unnamed weights."""
    placed: Callable[[TrackedRequest], None] | None = None
    """Function to call after a request's namespace was set; its argument is the request."""
    _just_named: bool = False
    """Whether vLLM has named the weights, without any computation or prefix-cache reset since then."""

    def named(self, version: str) -> bool:
        """Record a name of the weights; return whether the weights have changed."""
        self._just_named = True
        return self._become("" if version in self.of_the_start else version)

    def reset(self) -> bool:
        """Record a reset of the prefix cache; return whether the weights may have changed.

        For one change of weights, vLLM may call the reset before the call with the new name, or
        directly after it.
        """
        just_named, self._just_named = self._just_named, False
        return not just_named and self.change is WeightsChange.WITH_RESET and self._become(None)

    def computed(self) -> None:
        """Record that vLLM has computed, so that a later reset counts as another weight change."""
        self._just_named = False

    def namespace(self, kind: str) -> str:
        """Return the namespace of requests under the current weights.

        `kind` is the namespace without the part that names the weights; see `TrackedRequest.kind`.
        """
        if self.name == "":
            return kind
        parts: dict[str, object] = json.loads(kind) if kind else {}
        parts["weights"] = self.name or [self.life, self.changes]
        return ("" if self.name else NO_PERSIST_PREFIX) + json.dumps(parts, sort_keys=True)

    def place(self, tracked: TrackedRequest) -> None:
        """Set the namespace of a request without device pages to that of the current weights."""
        tracked.since, tracked.namespace = self.changes, self.namespace(tracked.kind)
        if self.placed is not None:
            self.placed(tracked)

    def _become(self, name: str | None) -> bool:
        if name is not None and name == self.name:
            return False
        self.name = name
        self.changes += 1
        return True
