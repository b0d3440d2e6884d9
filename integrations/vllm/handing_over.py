"""For how long engines that share a request's work wait for each other."""

from dataclasses import dataclass

from ...errors import ConfigError
from ...ranks.protocol.config import TIMEOUT_S_MAX, TTL_S_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class HandingOver:
    """Bounds on what engines do for each other; equal on every rank, in agreed time."""

    ttl_s: float = 60.0
    """For how long a request that has ended here is kept for the engine that goes on with it."""
    patience_s: float = 5.0
    """How long a request waits for what the engine that has computed it has promised."""

    def __post_init__(self) -> None:
        for name in ("ttl_s", "patience_s"):
            value = getattr(self, name)
            if not TTL_S_MIN <= value <= TIMEOUT_S_MAX:
                raise ConfigError(
                    f"{name} is {value:g}, must be {TTL_S_MIN} to {TIMEOUT_S_MAX:.0f}"
                )


FRESH = 2
"""After so many steps that have told the time it is that of now; a group that was idle has that of its
last step."""

HANDING_OVER = HandingOver()
"""As it is by default."""
