"""Stop policies: how long a prefetch may read from storage, and whether the engine waits for it.

Every policy has a deadline, measured by each rank's own executor. The first rank whose deadline passes
stops the prefetch on all ranks. The policies differ in how long the engine holds the request.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from .validated_settings import TIMEOUT_S_MAX, Settings

StopTime = Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)]


class StopRule(StrEnum):
    """The three ways in which an engine may wait for a prefetch."""

    BEST_EFFORT = "best_effort"
    """Schedule the request as soon as the engine can admit it, and use the pages that have landed by
    then."""
    WAIT_COMPLETE = "wait_complete"
    """Hold the request until all of its prefetch's pages have landed or no more can land."""
    TIMEOUT = "timeout"
    """Like `wait_complete`, with a deadline that grows with the number of tokens."""


_TIMEOUT = StopRule.TIMEOUT


@dataclass(frozen=True, kw_only=True)
class StopPolicy(Settings):
    """A stop policy and its durations in seconds.

    Under `timeout` a prefetch of n tokens may take `base_s + n / 1024 * per_ki_token_s`, at most
    `cap_s`. The other two policies are bounded by `cap_s` alone. Too short a timeout wastes completed
    reads; too long a timeout delays requests that could have been computed.
    """

    rule: StopRule = StopRule.TIMEOUT
    base_s: StopTime = 1.0
    per_ki_token_s: StopTime = 0.25
    cap_s: StopTime = 30.0

    def timeout_s(self, tokens: int) -> float:
        """Return the maximum duration of a prefetch of `tokens` tokens, in seconds."""
        if self.rule is _TIMEOUT:
            return min(self.cap_s, self.base_s + tokens / 1024 * self.per_ki_token_s)
        return self.cap_s

    @property
    def engine_waits(self) -> bool:
        """Whether the engine holds a request while its prefetch runs."""
        return self.rule is not StopRule.BEST_EFFORT
