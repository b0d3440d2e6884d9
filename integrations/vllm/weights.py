"""Which weights vLLM computes with, as a part of namespaces (rule R16).

A version that has a name is a part of every namespace, so its pages stay in host memory and storage
until they are evicted, and are found when it comes back. Weights that nobody has named could be any:
what is computed with them is found until the next change, and storage has nothing to do with it.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from ...ranks.replica.tree.node import PASSING
from .tracked import TrackedRequest

WEIGHTS_OF_THE_START = "default"
"""What vLLM calls the weights that it has loaded when it starts."""


class WeightsChange(StrEnum):
    """When vLLM's weights may have become others."""

    WITH_RESET = "with_reset"
    """When they are named, and whenever the connector is reset without a name before it."""
    WITH_NAME = "with_name"
    """When they are named, and only then: a reset keeps what is cached."""


class InFlight(StrEnum):
    """What becomes of a load that is under way when the weights change."""

    KEEP = "keep"
    """The request goes on with what is loaded for it."""
    COMPUTE = "compute"
    """The load counts as failed, so the request is computed anew."""


@dataclass(slots=True)
class Weights:
    """Follows which weights the engine has. Every rank calls it at the same points."""

    of_the_start: Collection[str] = (WEIGHTS_OF_THE_START,)
    """The names of the weights that the engine has started with."""
    life: str = ""
    """Stands for this life of the cache, and is no part of the keys of versions that have names."""
    change: WeightsChange = WeightsChange.WITH_RESET
    changes: int = 0
    """How often they have become others; what was computed before the last time is of former ones."""
    name: str | None = ""
    """What they are called; empty for those of the start, None where nobody knows."""
    placed: Callable[[TrackedRequest], None] | None = None
    """Told of each request that is in a namespace from now on."""
    _just_named: bool = False
    """Whether they were named, and since then neither reset nor computed with."""

    def named(self, version: str) -> bool:
        """Take note of their name; return whether they have become others."""
        self._just_named = True
        return self._become("" if version in self.of_the_start else version)

    def reset(self) -> bool:
        """Take note of a reset; return whether they have become others, for all that is known.

        An engine may be reset before it is told the name, or right after it, for the same change.
        """
        just_named, self._just_named = self._just_named, False
        return not just_named and self.change is WeightsChange.WITH_RESET and self._become(None)

    def computed(self) -> None:
        """Take note that the engine has computed with them: the next reset is for another change."""
        self._just_named = False

    def namespace(self, kind: str) -> str:
        """Return the namespace of requests of one kind (see `TrackedRequest`) under these weights."""
        if self.name == "":
            return kind
        parts: dict[str, object] = json.loads(kind) if kind else {}
        parts["weights"] = self.name or [self.life, self.changes]
        return ("" if self.name else PASSING) + json.dumps(parts, sort_keys=True)

    def place(self, tracked: TrackedRequest) -> None:
        """Let a request that holds nothing be one of these weights."""
        tracked.since, tracked.namespace = self.changes, self.namespace(tracked.kind)
        if self.placed is not None:
            self.placed(tracked)

    def _become(self, name: str | None) -> bool:
        if name is not None and name == self.name:
            return False
        self.name = name
        self.changes += 1
        return True
