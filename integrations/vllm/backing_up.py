"""The backups of what a request computes in a step."""

from ...ranks.host_cache import HostCache
from .contract import BlockState
from .lending import Lending
from .tracked import TrackedRequest


def back_up(
    cache: HostCache,
    lending: Lending,
    tracked: TrackedRequest,
    scheduled: int,
    blocks: BlockState,
) -> None:
    """Have the whole pages backed up that a request fills with the tokens that are scheduled for it.

    Not those of former weights, which nobody else may get.
    """
    computed, known = tracked.tokens_after(scheduled)
    pages = known // tracked.page_tokens
    if tracked.stale or pages <= tracked.lent_pages:
        return
    tracked.lent_pages = pages
    lent = lending.for_backup(
        blocks.resolve_block_ids(tracked.request.request_id),
        pages,
        # A state is not the one after a page if it has gone beyond, or may yet go back.
        state=computed == known == pages * tracked.page_tokens,
    )
    before, tokens = cache.copies(tracked.name), tracked.head(pages * tracked.page_tokens)
    cache.back_up(tracked.name, tokens, lent, tracked.namespace)
    passing = lending.passing(lent)
    begun = cache.copies(tracked.name)
    if passing and begun != before:
        lending.held.hold(tracked.name, begun[-1], passing)
