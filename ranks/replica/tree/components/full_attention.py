"""Full attention: one page of KV for every page of tokens, all of which a match needs."""

from ....protocol.orders import KV_POOL
from .base import PerPage


class FullAttentionComponent(PerPage):
    """The component that every model has; see `Component`.

    Its pages leave a tier from the leaves up, and take with them what other components have there:
    nothing can be used without them.
    """

    name = "full_attention"
    pool = KV_POOL
    index = 0
    span = None
    held_by_requests = True

    def needed_from(self, end: int) -> int:
        """Attention reads every token, so a match needs everything from the start."""
        del end
        return 0
