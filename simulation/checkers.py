"""What must be true, said independently of the code that makes it true.

The checkers know contents, not keys; they count pages themselves; and they read the replica only
where they compare it with what the memory holds or with another rank.
"""

from collections.abc import Iterable, Mapping, Sequence

from ..coordinator.operation import Kind, Phase
from ..ranks.config import CacheConfig, Recurrent
from ..ranks.rank_cache import RankCache
from ..ranks.replica.components.base import Component
from ..ranks.replica.matching import Match
from ..ranks.replica.serving import Admission
from ..ranks.replica.tree import DEVICE, HOST, Node, Place
from .conditions import LATE_US_MAX
from .memory import Contents, Memory, Slots, describe
from .prompts import TOKEN_BYTES

_STEPS_TO_AGREE = 40
"""Steps in which ranks that can restore different lengths must have found one that all can."""


class Violated(Exception):
    """Something that must hold did not; the message is one sentence."""


def check_match(found: Match, tokens: int, page_tokens: int) -> None:
    """A match is whole pages, no longer than what was asked for, and the device a part of it."""
    device, host = found.device_tokens, found.host_tokens
    if device % page_tokens or host % page_tokens or not 0 <= device <= host <= tokens:
        raise Violated(f"a match of {tokens} tokens finds {found}")


def check_admission(
    answer: Admission, before: Match, tokens: int, page_tokens: int, *, sparse: bool
) -> None:
    """An admission gives at least what a match just found, and loads what is not on the device.

    Where some state is `sparse`, more of the prefix may be on the device than a match there can end
    at: the rest of what that length needs is loaded.
    """
    parts = (answer.device_tokens, answer.host_tokens, answer.storage_tokens)
    total = sum(parts)
    if any(part < 0 or part % page_tokens for part in parts) or total > tokens:
        raise Violated(f"an admission for {tokens} tokens says {answer}")
    more = answer.device_tokens - before.device_tokens
    if more < 0 or (more and not sparse) or total < before.host_tokens:
        raise Violated(f"a match found {before}, and the admission right after it says {answer}")
    if (answer.operation is None) != (total == before.device_tokens):
        raise Violated(f"an admission loads without need, or needs without loading: {answer}")


def check_covered(who: str, covered: int, found: int, tokens: int, page_tokens: int) -> None:
    """What a backup has covered is whole pages of its tokens, and at least what a match finds."""
    if covered % page_tokens or not found <= covered <= tokens:
        raise Violated(
            f"{who}: {covered} of {tokens} tokens are on the host or on their way, and match finds "
            f"{found}"
        )


def check_hit(who: str, slots: Slots, table: Sequence[int], wanted: Mapping[int, int]) -> None:
    """The pages that a request uses hold the content of its prefix, and nothing writes them.

    `wanted` has contents by their place in the page table.
    """
    for index, content in wanted.items():
        page = table[index]
        if slots.content[page] != content:
            raise Violated(
                f"{who}: {slots.name} page {page} at {index} holds "
                f"{describe(slots.content[page])} instead of {describe(content)}"
            )
        if slots.written(page):
            raise Violated(
                f"{who}: {slots.name} page {page} at {index} is in use and being written"
            )


def check_expected(who: str, slots: Slots, expected: Mapping[int, int]) -> None:
    """Pages of requests hold what was computed or restored into them, at every step."""
    for page, content in expected.items():
        if slots.content[page] != content or slots.written(page):
            raise Violated(
                f"{who}: {slots.name} page {page} of a request holds "
                f"{describe(slots.content[page])} instead of {describe(content)}"
            )


class TreeChecker:
    """Compares what the tree offers with what the memory of each rank holds."""

    def __init__(self, contents: Contents, config: CacheConfig) -> None:
        self._contents = contents
        self._page_bytes = config.layout.page_tokens * TOKEN_BYTES
        self._states = {each.pool for each in config.components if isinstance(each, Recurrent)}

    def check(self, cache: RankCache, memories: Sequence[Memory]) -> None:
        """Every page that the tree owns holds its prefix, on every rank, and no transfer writes it.

        The replicas are equal, so the tree of one serves for all.
        """
        state = cache.replica.state
        for component in state.components:
            owners: tuple[dict[int, int], dict[int, int]] = ({}, {})
            for root in state.tree.roots.values():
                self._collect(component, root.place, root, b"", owners)
            for rank, memory in enumerate(memories):
                for tier in (DEVICE, HOST):
                    _check_offered(rank, memory.tiers[tier][component.pool], owners[tier])

    def _collect(
        self,
        component: Component,
        place: Place,
        node: Node,
        above: bytes,
        owners: tuple[dict[int, int], ...],
    ) -> None:
        for child in node.children.values():
            prefix = above + child.tokens
            for tier in (DEVICE, HOST):
                run = child.pages(tier, component.index)
                if run is None:
                    continue
                ends = self._ends(component.pool, child, len(above))
                if len(run) != len(ends):
                    raise Violated(
                        f"node {child.id} of {child.width} pages has {len(run)} of {component.pool}"
                    )
                for page, end in zip(run, ends, strict=True):
                    if page in owners[tier]:
                        raise Violated(
                            f"the tree owns {component.pool} page {page} of tier {tier} twice"
                        )
                    owners[tier][page] = self._contents.of(
                        place.namespace, prefix[:end], place.generation, pool=component.pool
                    )
            self._collect(component, place, child, prefix, owners)

    def _ends(self, pool: str, node: Node, above: int) -> list[int]:
        """Return by page where the prefix ends that it stands for; a state's is the node's end."""
        step = self._page_bytes
        first = node.width if pool in self._states else 1
        return [above + count * step for count in range(first, node.width + 1)]


def _check_offered(rank: int, slots: Slots, offered: Mapping[int, int]) -> None:
    for page, content in offered.items():
        if slots.content[page] != content:
            raise Violated(
                f"rank {rank}: the tree offers {slots.name} page {page} as {describe(content)}, "
                f"and it holds {describe(slots.content[page])}"
            )
        if slots.written(page):
            raise Violated(
                f"rank {rank}: the tree offers {slots.name} page {page}, which a transfer may "
                "still write"
            )


class Deadlines:
    """Every operation ends in bounded virtual time, whatever storage does."""

    def __init__(self, config: CacheConfig, *, step_us_max: int) -> None:
        times = config.timeouts
        self._limits_s = {
            (Kind.PREFETCH, Phase.WAITING): config.stop_policy.cap_s,
            (Kind.PREFETCH, Phase.QUERY): times.lookup_s,
            (Kind.PREFETCH, Phase.RESTORABLE): _STEPS_TO_AGREE * step_us_max / 1_000_000,
            (Kind.PREFETCH, Phase.TRANSFER): config.stop_policy.cap_s,
            (Kind.BACKUP, Phase.ISSUED): times.copy_s,
            (Kind.LOAD_BACK, Phase.ISSUED): times.copy_s,
            (Kind.PERSIST, Phase.ISSUED): times.persist_s,
            **{(kind, Phase.QUIESCE): times.quiesce_s for kind in Kind},
        }
        self._step_us_max = step_us_max
        self._since: dict[int, tuple[Phase, int]] = {}

    def begin_epoch(self) -> None:
        """Forget the operations of the group that has ended."""
        self._since.clear()

    def check(self, cache: RankCache, now_us: int) -> None:
        """Raise if an operation has stood in one phase for longer than that phase may last."""
        table = cache.replica.state.operations.in_flight
        since = self._since
        # Failed operations of one queue settle one in each round, and reports may come late.
        slack_us = LATE_US_MAX + (len(table) + 6) * self._step_us_max
        current: dict[int, tuple[Phase, int]] = {}
        for operation in table.values():
            before = since.get(operation.id)
            if before is None or before[0] is not operation.phase:
                before = (operation.phase, now_us)
            current[operation.id] = before
            limit_s = self._limits_s.get((operation.kind, operation.phase))
            if limit_s is not None and now_us - before[1] > limit_s * 1_000_000 + slack_us:
                raise Violated(
                    f"{operation.kind.name} {operation.id} stands in {operation.phase.name} for "
                    f"{(now_us - before[1]) / 1e6:.3f} s, and {limit_s} s is its limit"
                )
        self._since = current


def check_replicas(caches: Sequence[RankCache], step: int, *, thorough: bool) -> None:
    """The invariants hold, and the replicas are equal: by rolling digest, and from scratch.

    Equal replicas need be checked once, each rank's in turn; all of them where they are compared
    from scratch, too.
    """
    for rank, cache in enumerate(caches):
        if not thorough and rank != step % len(caches):
            continue
        try:
            cache.replica.check()
        except AssertionError as error:
            raise Violated(f"rank {rank}: {error}") from error
    digests = [cache.replica.digest for cache in caches]
    if len(set(digests)) > 1:
        raise Violated(f"the rolling digests differ: {digests}")
    if thorough:
        digests = [cache.replica.state_digest() for cache in caches]
        if len(set(digests)) > 1:
            raise Violated(f"the states differ, and the rolling digests do not: {digests}")


def check_loads(cache: RankCache) -> None:
    """A load into an engine's pages ends: it is not quarantined, and its request waits for no other."""
    state = cache.replica.state
    in_flight = state.operations.in_flight
    for operation in in_flight.values():
        if operation.kind is Kind.LOAD_BACK and operation.phase is Phase.QUARANTINED:
            raise Violated(
                f"load {operation.id} is quarantined, and nobody can keep the engine from its pages"
            )
    for request in state.requests.values():
        if request.load is not None and request.load not in in_flight:
            raise Violated(f"request {request.id} waits for load {request.load}, which is gone")


def check_at_rest(
    cache: RankCache, memories: Sequence[Memory], restless: Iterable[set[int]]
) -> None:
    """After the drain nothing is in flight but what a store never let go of, and nothing leaked."""
    in_flight = cache.replica.state.operations.in_flight
    never_quiet = set[int]().union(*restless)
    for operation in in_flight.values():
        if operation.phase is not Phase.QUARANTINED:
            raise Violated(
                f"{operation.kind.name} {operation.id} is still in {operation.phase.name} at rest"
            )
    for number in in_flight:
        if number not in never_quiet:
            raise Violated(f"operation {number} is quarantined, and every rank is quiet")
    if not in_flight:
        for node in cache.replica.state.tree.nodes():
            for tier in (DEVICE, HOST):
                if node.holds(tier):
                    raise Violated(f"node {node.id} is still held {node.holds(tier)} times at rest")
    for tier in (DEVICE, HOST):
        for component in cache.replica.state.components:
            slots = [memory.tiers[tier][component.pool] for memory in memories]
            _check_pool_at_rest(cache, tier, component.index, slots)


def _check_pool_at_rest(
    cache: RankCache, tier: int, component: int, slots: Sequence[Slots]
) -> None:
    """Every page of one pool is free, in the tree or in quarantine, and nothing touches a free one.

    `slots` are those of every rank.
    """
    state = cache.replica.state
    pool, name = state.pools[tier][component], slots[0].name
    runs = [node.pages(tier, component) for node in state.tree.nodes()]
    in_tree = sum(len(run) for run in runs if run is not None)
    in_flight = state.operations.in_flight.values()
    quarantined = sum(len(each.owned_pages(tier, component)) for each in in_flight)
    if pool.free + in_tree + quarantined != pool.capacity:
        raise Violated(
            f"{pool.free} {name} pages are free, {in_tree} in the tree and {quarantined} in "
            f"quarantine, of {pool.capacity}"
        )
    for rank, each in enumerate(slots):
        for page in pool.free_pages():
            if each.touched(page):
                raise Violated(
                    f"rank {rank}: {name} page {page} is free, and a transfer touches it"
                )
