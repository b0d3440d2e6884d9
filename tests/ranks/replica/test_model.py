"""Compare a tree of several components to a simple model without nodes.

The model is one set of pages for each component and tier. Each page is named by the whole prefix that
ends with it.
"""

from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.coordinator.operation import Queue
from lockstep.coordinator.verdict import Verdict, Watermark
from lockstep.errors import UsageError
from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.effects import Effects
from lockstep.ranks.protocol.orders import Fork
from lockstep.ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from lockstep.ranks.replica.check import check
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.replica import Replica
from lockstep.ranks.replica.tree.matching import Match
from lockstep.ranks.replica.tree.node import DEVICE, HOST

PAGE_TOKENS = 2
PAGE_BYTES = 4 * PAGE_TOKENS
NOT_YET = 1 << 50
TIERS = (DEVICE, HOST)

Pages = set[bytes]
"""A set of pages; the prefix that ends with a page is its name."""


Sizes = tuple[int, int]
"""A pool's numbers of device pages and host pages."""


def config(full: Sizes, other: Sizes, window: int | None, every: int | None) -> ReplicaConfig:
    """Return a replica's settings; without host pages for full attention, no pool has host pages."""
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
    """A replica, and the device copies (forks) that it has ordered."""

    config: ReplicaConfig
    names: int = 0
    round: int = 0
    replica: Replica = field(init=False)
    forks: list[Fork] = field(default_factory=list[Fork])

    def __post_init__(self) -> None:
        self.replica = Replica(self.config)

    def copies_end(self, *, failing: Queue | None = None) -> None:
        """Complete every copy in flight; the first copy of the queue named `failing` fails."""
        self.round += 1
        marks: list[Watermark] = []
        for queue in Queue:
            line = self.replica.operation_table.queues()[queue]
            failed = line[0][0] if line and queue is failing else None
            marks.append(
                Watermark(
                    queue=queue,
                    ended_through=-1 if failed is not None else NOT_YET,
                    first_failed=failed,
                    failed_rank=None if failed is None else 0,
                )
            )
        verdict = Verdict(
            round=self.round, time_ms=self.round, watermarks=tuple(marks), prefetch_slots=()
        )
        self.follow(self.replica.apply(verdict))
        check(self.replica)

    def follow(self, effects: Effects) -> None:
        """Record the fork orders (copies of state slots on the device) among the effects."""
        self.forks += [order for order in effects.orders if isinstance(order, Fork)]

    def serve(self, tokens: bytes, chunk: int) -> str | None:
        self.names += 1
        name = f"r{self.names}"
        total = len(tokens) // 4
        try:
            answer, effects = self.replica.load_back(name, "", tokens[:-4], total)
        except UsageError:
            # The replica refuses a prompt that is longer than a window's device pool.
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

    def admit(self, tokens: bytes) -> None:
        assert self.serve(tokens, 64) is not None

    def present(self, tier: int, component: int) -> Pages:
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


class Obvious:
    """The tree's content at one time, as a set of pages for each component and tier."""

    def __init__(self, driven: Driven) -> None:
        self._components = driven.replica.prefixes.components
        self._device, self._host = (
            [driven.present(tier, each.index) for each in self._components] for tier in TIERS
        )
        self._anywhere = [
            device | host for device, host in zip(self._device, self._host, strict=True)
        ]

    def length(self, tokens: bytes, have: list[Pages]) -> int:
        return next(
            pages
            for pages in range(len(tokens) // PAGE_BYTES, -1, -1)
            if not pages
            or all(
                tokens[: (at + 1) * PAGE_BYTES] in there
                for component, there in zip(self._components, have, strict=True)
                for at in range(component.needed_from(pages), pages)
            )
        )

    def match(self, tokens: bytes) -> Match:
        last = 0
        while (
            last < len(tokens) // PAGE_BYTES and tokens[: (last + 1) * PAGE_BYTES] in self._host[0]
        ):
            last += 1
        return Match(
            device_tokens=self.length(tokens, self._device) * PAGE_TOKENS,
            host_tokens=self.length(tokens, self._anywhere) * PAGE_TOKENS,
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
    branch: bytes,
) -> None:
    found = matches_on_the_way(Driven(config(*sizes, *model)), served, branch)

    assert [match for match, _ in found] == [obvious for _, obvious in found]


def matches_on_the_way(
    driven: Driven, served: list[tuple[bytes, int, str]], branch: bytes
) -> list[tuple[Match, Match]]:
    """Serve prompts, and match many prompts after each; return pairs (found, expected by the model)."""
    kept: list[str] = []
    found: list[tuple[Match, Match]] = []
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
        # Match two prompts for each page boundary: one branches off there, and the other ends there.
        turns = [tokens[:at] + branch[at:] for at in range(0, len(tokens) + 1, PAGE_BYTES)]
        ends = [tokens[:at] for at in range(0, len(tokens), PAGE_BYTES)]
        obvious = Obvious(driven)
        found += [
            (driven.replica.match("", prompt), obvious.match(prompt)) for prompt in turns + ends
        ]
    return found


@settings(max_examples=100, deadline=None)
@given(models, st.lists(prompts, max_size=6))
def test_with_room_for_everything_what_was_served_is_found_again(
    model: tuple[int | None, int | None], served: list[bytes]
) -> None:
    """With room for everything, all whole pages match; with states, those up to the last checkpoint."""
    driven = Driven(config((400, 400), (400, 400), *model))
    # The last token of a prompt is always computed, so the last checkpoint lies before it.
    uncached = 0 if model[1] is None else 4

    on_device, on_host = list[int](), list[int]()
    for tokens in served:
        driven.admit(tokens)
        on_device.append(driven.replica.match("", tokens).device_tokens)
        driven.copies_end()
        on_host.append(driven.replica.match("", tokens).last_host_tokens)

    expected = [(len(tokens) - uncached) // PAGE_BYTES * PAGE_TOKENS for tokens in served]
    assert all(found >= least for found, least in zip(on_device, expected, strict=True))
    assert on_host == [len(tokens) // PAGE_BYTES * PAGE_TOKENS for tokens in served]


@settings(max_examples=100, deadline=None)
@given(models, pools, actions)
def test_a_state_is_copied_to_and_from_slots_that_nothing_else_owns(
    model: tuple[int | None, int | None],
    sizes: tuple[Sizes, Sizes],
    served: list[tuple[bytes, int, str]],
) -> None:
    """A state slot in the tree is never written again: requests copy states from and to other slots."""
    driven = Driven(config(*sizes, *model))

    shared = [shared_slots(driven, tokens, chunk) for tokens, chunk, _ in served]

    assert shared == [set()] * len(served)
    assert [fork for fork in driven.forks if fork.source == fork.destination] == []


def shared_slots(driven: Driven, tokens: bytes, chunk: int) -> set[int]:
    """Serve a request; return the state slots that it may write although the tree owns them."""
    name = driven.serve(tokens, chunk)
    if name is None:
        return set()
    shared: set[int] = set()
    for component in driven.replica.prefixes.components:
        if not component.per_page:
            working = driven.replica.page_table(name, component.pool)
            assert len(working) == 1
            nodes = driven.replica.prefixes.tree.nodes()
            in_tree = {page for each in nodes for page in each.pages(DEVICE, component.index) or ()}
            shared |= in_tree.intersection(working)
    driven.replica.release(name)
    driven.copies_end()
    return shared
