"""Engine-owned device pages, lent for copies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ....errors import UsageError
from ..core.pages import PageRun, page_run
from ..tree.components import Component
from ..tree.matching import Missing
from ..tree.node import Node

NO_PAGE = -1
"""Page table entry for a position at which a request has no page with valid contents."""


class Unfilled(NamedTuple):
    """Positions of a component whose lent pages a load leaves unfilled, because no token reads them.

    The pages keep their old contents, so no copy may treat them as part of the prefix.
    """

    load: int
    component: int
    start: int
    end: int


def unfilled_after(
    load: int,
    components: Sequence[Component],
    first: int,
    starts: Sequence[int],
    before: Iterable[Unfilled] = (),
) -> list[Unfilled]:
    """Return the positions that are unfilled after a load fills each component from `starts` on.

    `load` is the operation id of the load. `before` are the positions that were unfilled before it.
    Those below `first` are still unfilled, because the engine lends pages only from `first` on.
    """
    kept = [each._replace(end=min(each.end, first)) for each in before if each.start < first]
    return kept + [
        Unfilled(load, each.index, first, start)
        for each, start in zip(components, starts, strict=True)
        if each.per_page and start > first
    ]


def without_unfilled(runs: Sequence[PageRun], unfilled: Iterable[Unfilled]) -> list[PageRun]:
    """Return the pages of a whole prefix, with `NO_PAGE` for pages that no load has filled."""
    left = list(runs)
    for _, index, start, end in unfilled:
        count = min(end, len(left[index])) - start
        if count > 0:
            run = left[index] = page_run(left[index])
            run[start : start + count] = page_run([NO_PAGE]) * count
    return left


@dataclass(frozen=True, slots=True)
class Lent:
    """The device pages that a request lends, by component; they enter no digest (R3).

    For a component with one page per page of tokens: the pages from position `first` on, with `NO_PAGE`
    for missing ones. For a state: the slot of the state after page `last`, or nothing. Page numbers
    differ between ranks.
    """

    request: str
    first: int
    last: int
    runs: Sequence[PageRun]

    def of(self, node: Node, component: Component) -> PageRun | None:
        """Return the lent pages of a component for a node; None if any of them is missing."""
        run = self.runs[component.index]
        if not component.per_page:
            there = len(run) == 1 and run[0] != NO_PAGE and node.end == self.last
            return run if there else None
        mine = run[node.start - self.first : node.end - self.first]
        return mine if len(mine) == node.width and NO_PAGE not in mine else None

    def pages_for(
        self, missing: Sequence[Missing], components: Sequence[Component]
    ) -> list[PageRun]:
        """Return, by component, the lent pages of the (node, component) pairs in `missing`.

        All these pages must be lent.
        """
        pages = [page_run() for _ in components]
        for node, index in missing:
            run = self.of(node, components[index])
            assert run is not None
            pages[index].extend(run)
        return pages

    def needed_from(self, component: Component) -> int:
        """Return the first position of a component that a request reads when it continues after `last`.

        If the request has computed part of the page after `last`, it reads less of the window than a
        match that ends at `last`. The engine may have freed the window pages that only the match needs.
        """
        if not component.per_page:
            return self.first
        return max(component.needed_from(self.last), self.whole_from(component))

    def whole_from(self, component: Component) -> int:
        """Return the position from which all pages of a component are lent, without a gap."""
        run = self.runs[component.index][: self.last - self.first]
        gaps = [at for at, page in enumerate(run, self.first + 1) if page == NO_PAGE]
        return max((self.first, *gaps[-1:]))

    def require(self, components: Sequence[Component], starts: Sequence[int]) -> None:
        """Raise `UsageError` unless all pages from `starts` (by component) on are lent."""
        for component, start in zip(components, starts, strict=True):
            run, count = self.runs[component.index], 1
            if component.per_page:
                run, count = run[start - self.first : self.last - self.first], self.last - start
            if len(run) != count or NO_PAGE in run:
                raise UsageError(
                    f"request {self.request!r} lacks lent pages of pool {component.pool!r} for the"
                    f" pages {start} to {self.last}"
                )


def require_all(
    name: str, components: Sequence[Component], runs: Sequence[PageRun], pages: int, *, state: bool
) -> None:
    """Raise `UsageError` unless a request lends `pages` pages and its state.

    For a window component only the last page must be present; others may be `NO_PAGE`.
    """
    for component, run in zip(components, runs, strict=True):
        count = pages if component.per_page else int(state)
        if len(run) != count or NO_PAGE in (run if component.span is None else run[-1:]):
            raise UsageError(
                f"request {name!r} lends {len(run) - run.count(NO_PAGE)} pages of pool"
                f" {component.pool!r}, and its computed tokens need {count}"
            )


def lent_for_all(  # noqa: PLR0917 - what is lent, and for what.
    name: str,
    components: Sequence[Component],
    runs: Sequence[PageRun],
    start_tokens: int,
    computed: int,
    page_tokens: int,
) -> Lent:
    """Return a request's lent pages for its computed tokens, without the first `start_tokens`.

    Raises `UsageError` if pages are missing, or if `start_tokens` is not a page boundary within the
    computed tokens.
    """
    first, last = start_tokens // page_tokens, computed // page_tokens
    if start_tokens % page_tokens or first > last:
        raise UsageError(
            f"request {name!r} resumes from token {start_tokens}, which must be a multiple of"
            f" {page_tokens} and at most {last * page_tokens}"
        )
    count = -(-computed // page_tokens) - first
    require_all(name, components, runs, count, state=computed > 0)
    return Lent(name, first, last, runs)


def require_prefix(
    name: str, components: Sequence[Component], runs: Sequence[PageRun], pages: int
) -> None:
    """Raise `UsageError` unless a request lends `pages` full-attention pages and at most one state."""
    lent = np.frombuffer(runs[0], dtype=np.int32)[:pages]
    there = int(np.count_nonzero(lent != NO_PAGE))
    if there < pages:
        raise UsageError(f"request {name!r} lends {there} device pages for {pages} pages of tokens")
    for component, run in zip(components, runs, strict=True):
        if not component.per_page and len(run) > 1:
            raise UsageError(
                f"request {name!r} lends {len(run)} slots of pool {component.pool!r} for one state"
            )
