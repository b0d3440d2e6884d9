"""Hit counts of reference caches on a trace: unbounded, optimal (Belady), and FIFO.

Belady's cache knows the future. It evicts the page whose next use is latest, and does not admit a page
whose next use is later than the next use of every cached page. In a prompt, the next use of a page is
never later than that of the pages after it. A prefix is therefore evicted from its end, as a tree
requires. No cache of the same size has more hits, whatever its tiers and policy.

Pages that always occur together form a run. Counting runs instead of pages saves time.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from .prompts import ID_BYTES, PagedPrompt


@dataclass(slots=True, eq=False)
class SharedPages:
    """A run: consecutive pages that occur only together, so a prompt has all of them or none."""

    number: int
    """Number of the run; in a prompt, each run has a higher number than the runs before it."""
    first_page: int
    """Number of pages in all runs with a lower number."""
    width: int


@dataclass(slots=True)
class _Branch:
    ids: bytes
    below: dict[bytes, "_Branch"] = field(default_factory=dict[bytes, "_Branch"])
    run: SharedPages | None = None

    def cut(self, at: int) -> None:
        """Split this branch of the tree of prompts into two, after `at` bytes."""
        lower = _Branch(self.ids[at:], self.below)
        self.ids, self.below = self.ids[:at], {lower.ids[:ID_BYTES]: lower}


@dataclass(frozen=True, slots=True)
class Path:
    """A prompt as a sequence of runs."""

    usable: tuple[SharedPages, ...]
    """The prompt's runs that can be cache hits. The page of the last token is left out, because that
    token is always computed."""
    whole: tuple[SharedPages, ...]
    """All runs of the prompt, which can be cached once the prompt has been computed."""


def paths(prompts: Sequence[PagedPrompt]) -> tuple[list[Path], int]:
    """Return (each prompt as a sequence of runs, number of distinct pages of all prompts)."""
    top = _Branch(b"")
    for prompt in prompts:
        _grow(top, prompt.ids)
        _grow(top, prompt.ids[: prompt.usable * ID_BYTES])
    runs = pages = 0
    found: list[Path] = []
    for prompt in prompts:
        branch, done = top, 0
        whole: list[SharedPages] = []
        usable = 0
        while done < len(prompt.ids):
            branch = branch.below[prompt.ids[done : done + ID_BYTES]]
            done += len(branch.ids)
            if branch.run is None:
                branch.run = SharedPages(runs, pages, len(branch.ids) // ID_BYTES)
                runs += 1
                pages += branch.run.width
            whole.append(branch.run)
            usable += done <= prompt.usable * ID_BYTES
        found.append(Path(tuple(whole[:usable]), tuple(whole)))
    return found, pages


def _grow(top: _Branch, ids: bytes) -> None:
    """Add a prompt's pages to the tree of prompts; split the branch in which the prompt diverges."""
    branch, done = top, 0
    while done < len(ids):
        following = branch.below.get(ids[done : done + ID_BYTES])
        if following is None:
            branch.below[ids[done : done + ID_BYTES]] = _Branch(ids[done:])
            return
        branch = following
        common = _common(branch.ids, ids, done)
        if common < len(branch.ids):
            branch.cut(common)
        done += common


def _common(ids: bytes, other: bytes, at: int) -> int:
    """Return the length in bytes of the common prefix of `ids` and `other[at:]`, in whole pages."""
    if other.startswith(ids, at):
        return len(ids)
    few, many = 0, min(len(ids), len(other) - at) // ID_BYTES + 1
    while many - few > 1:
        middle = (few + many) // 2
        if other.startswith(ids[: middle * ID_BYTES], at):
            few = middle
        else:
            many = middle
    return few * ID_BYTES


def ideal(prompts: Sequence[Path]) -> list[int]:
    """Return for each prompt how many pages an unbounded cache would hit."""
    seen: set[int] = set()
    hits: list[int] = []
    for path in prompts:
        hit = 0
        for run in path.usable:
            if run.number not in seen:
                break
            hit += run.width
        hits.append(hit)
        seen.update(run.number for run in path.whole)
    return hits


def belady(prompts: Sequence[Path], pages: int) -> list[int]:
    """Return for each prompt how many pages an optimal cache of `pages` pages would hit."""
    following = _next_uses(prompts)
    held: dict[int, int] = {}
    """By run number: how many of the run's first pages are cached."""
    when: dict[int, float] = {}
    widest: list[tuple[float, int]] = []
    """Heap of (-next use, -run number) of cached runs; the run whose next use is latest comes first.
    `when` has the current next use of each cached run. An entry with another next use is outdated,
    and is skipped."""
    free = pages
    hits: list[int] = []
    for at, path in enumerate(prompts):
        hits.append(_leading(path.usable, held))
        for run, needed in zip(path.whole, following[at], strict=True):
            if when.get(run.number) != needed and run.number in held:
                when[run.number] = needed
                heapq.heappush(widest, (-needed, -run.number))
        for run, needed in zip(path.whole, following[at], strict=True):
            have = held.get(run.number, 0)
            lacks = run.width - have
            while lacks > free and widest:
                last, number = -widest[0][0], -widest[0][1]
                if when.get(number) != last:
                    heapq.heappop(widest)
                    continue
                if last <= needed:
                    break
                leaving = min(held[number], lacks - free)
                held[number] -= leaving
                free += leaving
                if not held[number]:
                    del held[number], when[number]
                    heapq.heappop(widest)
            taken = min(lacks, free)
            if taken and needed != inf:
                held[run.number] = have + taken
                free -= taken
                when[run.number] = needed
                heapq.heappush(widest, (-needed, -run.number))
            if taken < lacks:
                break
    return hits


def _next_uses(prompts: Sequence[Path]) -> list[tuple[float, ...]]:
    """Return for each run of each prompt the index of the next prompt that can hit the run."""
    latest: dict[int, float] = {}
    uses: list[tuple[float, ...]] = []
    for at in range(len(prompts) - 1, -1, -1):
        path = prompts[at]
        uses.append(tuple(latest.get(run.number, inf) for run in path.whole))
        latest.update((run.number, at) for run in path.usable)
    return uses[::-1]


def _leading(runs: Sequence[SharedPages], held: dict[int, int]) -> int:
    hit = 0
    for run in runs:
        there = held.get(run.number, 0)
        hit += there
        if there < run.width:
            break
    return hit


def fifo(prompts: Sequence[Path], pages: int) -> list[int]:
    """Return for each prompt how many pages a FIFO cache of `pages` pages would hit."""
    cached = bytearray(
        max((run.first_page + run.width for p in prompts for run in p.whole), default=0)
    )
    queue: deque[int] = deque()
    hits: list[int] = []
    for path in prompts:
        hits.append(_leading_pages(path.usable, cached))
        for run in path.whole:
            for page in range(run.first_page, run.first_page + run.width):
                if cached[page]:
                    continue
                if len(queue) >= pages:
                    cached[queue.popleft()] = 0
                cached[page] = 1
                queue.append(page)
    return hits


def _leading_pages(runs: Sequence[SharedPages], cached: bytearray) -> int:
    hit = 0
    for run in runs:
        missing = cached.find(0, run.first_page, run.first_page + run.width)
        if missing >= 0:
            return hit + missing - run.first_page
        hit += run.width
    return hit
