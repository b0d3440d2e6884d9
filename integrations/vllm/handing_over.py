"""For how long engines that share a request's work wait for each other."""

from dataclasses import dataclass

from ...coordinator.settings import Settings
from ...ranks.protocol.config import TtlSeconds


@dataclass(frozen=True, kw_only=True)
class HandingOver(Settings):
    """Bounds on what engines do for each other; equal on every rank, in agreed time."""

    ttl_s: TtlSeconds = 60.0
    """For how long a request that has ended here is kept for the engine that goes on with it."""
    patience_s: TtlSeconds = 5.0
    """How long a request waits for what the engine that has computed it has promised."""


FRESH = 2
"""After so many steps that have told the time it is that of now; a group that was idle has that of its
last step."""

HANDING_OVER = HandingOver()
"""As it is by default."""
