"""The tree with several components, held against a slow and obvious model of it.

The model knows no nodes: it is a set of pages for each component and tier, each page named by the
whole prefix that it ends. What a match of some length needs is then one sentence for each component.
"""

from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.coordinator.operation import Queue
from lockstep.coordinator.verdict import Verdict, Watermark
from lockstep.errors import UsageError
from lockstep.ranks.orders import Fork
from lockstep.ranks.replica.answers import Admission
from lockstep.ranks.replica.check import check
from lockstep.ranks.replica.effects import Effects
from lockstep.ranks.replica.replica import Replica
from lockstep.ranks.replica.requests import LoadState
from lockstep.ranks.replica.settings import ComponentSettings, ReplicaConfig
from lockstep.ranks.replica.tree.matching import Match
from lockstep.ranks.replica.tree.node import DEVICE, HOST

PAGE_TOKENS = 2
PAGE_BYTES = 4 * PAGE_TOKENS
NOT_YET = 1 << 50
TIERS = (DEVICE, HOST)

Pages = set[bytes]
"""Pages by the prefixes that they end."""


Sizes = tuple[int, int]
"""Pages on the device and on the host."""


def config(full: Sizes, other: Sizes, window: int | None, every: int | None) -> ReplicaConfig:
    """Return a model's settings; with no host pages of full attention no pool has any."""
    components: list[ComponentSettings] = []
    for kind, pool, pages in (("sliding_window", "window", window), ("recurrent", "state", every)):
        if pages is not None:
            components.append(
                ComponentSettings(
                    kind=kind,
                    pool=pool,
                    device_pages=other[0],
                    host_pages=other[1] if full[1] else 0,
                    every_pages=pages,
                )
            )
    return ReplicaConfig(
        page_tokens=PAGE_TOKENS,
        device_pages=full[0],
        host_pages=full[1],
        components=tuple(components),
        has_store=False,
        model_digest=b"model",
    )


@dataclass
class Driven:
    """A replica, and an engine that obeys it."""

    config: ReplicaConfig
    names: int = 0
    round: int = 0
    replica: Replica = field(init=False)
    forks: list[Fork] = field(default_factory=list[Fork])

    def __post_init__(self) -> None:
        self.replica = Replica(self.config)

    def copies_end(self, *, failing: Queue | None = None) -> None:
        """Let every copy in flight end, the first of one queue badly."""
        self.round += 1
        marks: list[Watermark] = []
        for queue in Queue:
            line = self.replica.agenda.queues()[queue]
            failed = line[0][0] if line and queue is failing else None
            marks.append(
                Watermark(
                    queue=queue,
                    ended_through=-1 if failed is not None else NOT_YET,
                    first_failed=failed,
                    failed_rank=None if failed is None else 0,
                )
            )
        verdict = Verdict(round=self.round, time_ms=self.round, watermarks=tuple(marks), seats=())
        self.follow(self.replica.apply(verdict))
        check(self.replica)

    def follow(self, effects: Effects) -> None:
        """Keep what was ordered of the engine's own stream."""
        self.forks += [order for order in effects.orders if isinstance(order, Fork)]

    def serve(self, tokens: bytes, chunk: int) -> str | None:
        """Admit a request and compute its prompt in chunks; None if there was no room for it."""
        self.names += 1
        name = f"r{self.names}"
        total = len(tokens) // 4
        try:
            answer, effects = self.replica.load_back(name, "", tokens[:-4], total)
        except UsageError:
            # It is longer than a window's pool.
            return None
        check(self.replica)
        self.follow(effects)
        if not isinstance(answer, Admission):
            self.replica.release(name)
            return None
        if answer.operation is not None:
            self.copies_end()
        assert self.replica.load_state(name) is LoadState.READY
        stops = {*answer.checkpoints, *range(answer.cached_tokens + chunk, total, chunk), total}
        for stop in sorted(stops):
            if stop > answer.cached_tokens:
                _, effects = self.replica.insert(name, tokens[: stop * 4], final=stop == total)
                self.follow(effects)
                check(self.replica)
        return name

    def present(self, tier: int, component: int) -> Pages:
        """Return the pages that the tree has, page by page."""
        pages: Pages = set()
        part = self.replica.prefixes.components[component]
        for node in self.replica.prefixes.tree.nodes():
            run = node.pages(tier, component)
            if run is None:
                continue
            prefix = b"".join(each.tokens for each in node.path_down())
            first = node.start if part.per_page else node.end - 1
            pages |= {prefix[: (at + 1) * PAGE_BYTES] for at in range(first, node.end)}
        return pages


def obvious_length(driven: Driven, tokens: bytes, tiers: tuple[int, ...]) -> int:
    """Return the longest prefix of whole pages for which every component has what it needs."""
    components = driven.replica.prefixes.components
    have = [
        set[bytes]().union(*(driven.present(tier, each.index) for tier in tiers))
        for each in components
    ]
    for pages in range(len(tokens) // PAGE_BYTES, 0, -1):
        whole = True
        for component, there in zip(components, have, strict=True):
            first = component.needed_from(pages)
            whole &= all(tokens[: (at + 1) * PAGE_BYTES] in there for at in range(first, pages))
        if whole:
            return pages
    return 0


def obvious_match(driven: Driven, tokens: bytes) -> Match:
    host = driven.present(HOST, 0)
    last = 0
    while last < len(tokens) // PAGE_BYTES and tokens[: (last + 1) * PAGE_BYTES] in host:
        last += 1
    return Match(
        device_tokens=obvious_length(driven, tokens, (DEVICE,)) * PAGE_TOKENS,
        host_tokens=obvious_length(driven, tokens, TIERS) * PAGE_TOKENS,
        last_host_tokens=last * PAGE_TOKENS,
    )


prompts = st.lists(st.integers(0, 1), min_size=2, max_size=24).map(
    lambda tokens: array("i", tokens).tobytes()
)
models = st.tuples(st.none() | st.integers(1, 4), st.none() | st.integers(1, 3))
pools = st.tuples(
    st.tuples(st.integers(12, 30), st.integers(0, 30)),
    st.tuples(st.integers(4, 30), st.integers(1, 30)),
)
actions = st.lists(
    st.tuples(prompts, st.integers(1, 9), st.sampled_from(("keep", "release", "end", "fail"))),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(models, pools, actions, prompts)
def test_a_match_is_what_a_model_without_nodes_says_it_is(
    model: tuple[int | None, int | None],
    sizes: tuple[Sizes, Sizes],
    served: list[tuple[bytes, int, str]],
    asked: bytes,
) -> None:
    driven = Driven(config(*sizes, *model))
    kept: list[str] = []
    for tokens, chunk, then in served:
        name = driven.serve(tokens, chunk)
        if then == "end":
            driven.copies_end()
        elif then == "fail":
            driven.copies_end(failing=Queue.BACKUP)
        if name is not None:
            kept.append(name)
        if then != "keep" and kept:
            driven.replica.release(kept.pop(0))
            check(driven.replica)
        # Prompts that end, or turn elsewhere, anywhere in what was served.
        turns = [tokens[:at] + asked[at:] for at in range(0, len(tokens) + 1, PAGE_BYTES)]
        for prompt in (*turns, *(tokens[:at] for at in range(0, len(tokens), PAGE_BYTES))):
            assert driven.replica.match("", prompt) == obvious_match(driven, prompt)


@settings(max_examples=100, deadline=None)
@given(models, st.lists(prompts, max_size=6))
def test_with_room_for_everything_what_was_served_is_found_again(
    model: tuple[int | None, int | None], served: list[bytes]
) -> None:
    """Full attention and windows to the last whole page; states to the last checkpoint before it."""
    driven = Driven(config((400, 400), (400, 400), *model))
    every = model[1]
    for tokens in served:
        name = driven.serve(tokens, 64)
        assert name is not None
        whole = len(tokens) // PAGE_BYTES
        # The last token of a prompt is computed in any case, so the last checkpoint lies before it.
        expected = whole if every is None else (len(tokens) - 4) // PAGE_BYTES
        found = driven.replica.match("", tokens)
        assert found.device_tokens >= expected * PAGE_TOKENS
        driven.copies_end()
        assert driven.replica.match("", tokens).last_host_tokens == whole * PAGE_TOKENS


@settings(max_examples=100, deadline=None)
@given(models, pools, actions)
def test_a_state_is_copied_to_and_from_slots_that_nothing_else_owns(
    model: tuple[int | None, int | None],
    sizes: tuple[Sizes, Sizes],
    served: list[tuple[bytes, int, str]],
) -> None:
    """Copy on write: what the tree has is read and never written, but when it is made."""
    driven = Driven(config(*sizes, *model))
    prefixes = driven.replica.prefixes
    for tokens, chunk, _ in served:
        name = driven.serve(tokens, chunk)
        assert all(fork.source != fork.destination for fork in driven.forks)
        if name is None:
            continue
        for component in prefixes.components:
            if component.per_page:
                continue
            (working,) = driven.replica.page_table(name, component.pool)
            in_tree = [
                page
                for node in prefixes.tree.nodes()
                for page in node.pages(DEVICE, component.index) or ()
            ]
            assert working not in in_tree
        driven.replica.release(name)
        driven.copies_end()
