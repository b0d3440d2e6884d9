"""Stop policies: how long a prefetch waits for storage, and how long the engine waits for it.

Every policy is bounded: each has a deadline, measured by each rank's own executor, and the first
rank that sees it pass stops all of them. What differs is what the engine waits for.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from .settings import TIMEOUT_S_MAX, Settings

StopTime = Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)]


class StopRule(StrEnum):
    """The three ways in which an engine may wait for a prefetch."""

    BEST_EFFORT = "best_effort"
    """The request is scheduled as soon as there is room; what has landed by then is used."""
    WAIT_COMPLETE = "wait_complete"
    """The request waits until everything has landed or nothing more can."""
    TIMEOUT = "timeout"
    """As wait_complete, but no longer than a time that grows with the number of tokens."""


_TIMEOUT = StopRule.TIMEOUT


@dataclass(frozen=True, kw_only=True)
class StopPolicy(Settings):
    """A stop rule with its times.

    Under `timeout` a prefetch of n tokens may take `base_s + n / 1024 * per_ki_token_s`, at most
    `cap_s`. The other two rules are bounded by `cap_s` alone. Too small a time wastes what was read;
    too large a time lets a slow store delay a request that could have been computed.
    """

    rule: StopRule = StopRule.TIMEOUT
    base_s: StopTime = 1.0
    per_ki_token_s: StopTime = 0.25
    cap_s: StopTime = 30.0

    def timeout_s(self, tokens: int) -> float:
        """Return how long a prefetch of `tokens` tokens may take."""
        if self.rule is _TIMEOUT:
            return min(self.cap_s, self.base_s + tokens / 1024 * self.per_ki_token_s)
        return self.cap_s

    @property
    def engine_waits(self) -> bool:
        """Whether the engine holds a request back while its prefetch runs."""
        return self.rule is not StopRule.BEST_EFFORT
