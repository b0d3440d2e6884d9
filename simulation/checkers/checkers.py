"""Checkers of rules that must hold after every simulated step, independent of the code under test.

The checkers compare page contents instead of page keys, and count pages themselves. They read the
replica only to compare it with memory contents or with another rank's replica.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...coordinator.operation import OperationKind, Phase
from ...ranks.group.host_cache import HostCache
from ...ranks.group.member.rank_cache import RankCache
from ...ranks.protocol.answers import Admission
from ...ranks.protocol.config import RankCacheConfig, Recurrent
from ...ranks.replica.check import InvariantViolation
from ...ranks.replica.operations.requests import LoadState
from ...ranks.replica.tree.components import Component
from ...ranks.replica.tree.matching import Match
from ...ranks.replica.tree.node import DEVICE, HOST, Node, TreeIdentity
from ...ranks.replica.tree.page_allocator import TIER_NAMES
from ..rank.conditions import LATE_US_MAX
from ..rank.memory import Slots, SymbolicMemory
from ..world.contents import ExpectedContents, describe
from ..world.prompts import TOKEN_BYTES
from ..world.violated import Violated

_STEPS_TO_AGREE = 40
"""Maximum number of steps until ranks agree on one prefix length, if they can restore different ones.
"""


def check_match(found: Match, tokens: int, page_tokens: int) -> None:
    """Raise unless 0 <= device tokens <= host tokens <= `tokens` for a match, all in whole pages."""
    device, host = found.device_tokens, found.host_tokens
    if device % page_tokens or host % page_tokens or not 0 <= device <= host <= tokens:
        raise Violated(f"a match of {tokens} tokens finds {found}")


def check_admission(
    answer: Admission, before: Match, tokens: int, page_tokens: int, *, sparse: bool
) -> None:
    """Raise unless an admission has all tokens that a match just found, and loads those off the device.

    If the model is `sparse` (has more components than full attention), the match may be shorter
    than the prefix on the device. The admission may then use more device tokens than the match.
    """
    parts = (answer.device_tokens, answer.host_tokens, answer.storage_tokens)
    total = sum(parts)
    if any(part < 0 or part % page_tokens for part in parts) or total > tokens:
        raise Violated(f"an admission for {tokens} tokens says {answer}")
    more = answer.device_tokens - before.device_tokens
    if more < 0 or (more and not sparse) or total < before.host_tokens:
        raise Violated(f"an admission says {answer} right after a match found {before}")
    if (answer.operation is None) != (total == before.device_tokens):
        raise Violated(f"an admission's load operation does not match its tokens: {answer}")


def check_covered(request: str, covered: int, found: int, tokens: int, page_tokens: int) -> None:
    """Raise unless a backup covers whole pages only, and all tokens that a match finds on the host."""
    if covered % page_tokens or not found <= covered <= tokens:
        detail = f"covers {covered} of {tokens} tokens, and match finds {found}"
        raise Violated(f"a back_up of request {request} {detail}")


def check_holding(slots: Slots, wanted: Iterable[tuple[int, int, str]]) -> None:
    """Raise if a page in use lacks this rank's shard of its content, or if a transfer writes the page.

    Each entry of `wanted` has a page, the content that it should hold, and the name of the request that
    uses it.
    """
    held, shard, writer = slots.content, slots.shard, slots.writer
    for page, content, request in wanted:
        if held[page] != content + shard:
            raise Violated(slots.wrong_page(page, request, content + shard))
        if writer[page] is not None:
            what = f"{slots.slot(page)} of request {request} is in use and may still be written"
            raise Violated(f"rank {slots.rank}: {what}")


class TreeChecker:
    """Compares the page tables of the prefix tree with the pages in each rank's memory."""

    def __init__(self, contents: ExpectedContents, config: RankCacheConfig) -> None:
        self._contents = contents
        self._page_bytes = config.layout.page_tokens * TOKEN_BYTES
        self._states = {each.pool for each in config.components if isinstance(each, Recurrent)}
        self._known: dict[tuple[str, str, int, int, bytes], list[int]] = {}
        """Expected contents of the pages of a tree node, by pool, namespace, generation, width and
        prefix."""

    def check(self, cache: RankCache, memories: Sequence[SymbolicMemory]) -> None:
        """Raise unless each page of the prefix tree holds the right content on every rank.

        No transfer may be writing such a page. The replicas are equal, so one rank's tree is compared
        with the memory of every rank.
        """
        prefixes = cache.inspection.prefixes
        nodes = [each for root in prefixes.tree.roots.values() for each in _below(root)]
        for component in prefixes.components:
            offered = self._offered(component, nodes)
            for memory in memories:
                for tier in (DEVICE, HOST):
                    _check_offered(memory.tiers[tier][component.pool], offered[tier])

    def _offered(
        self, component: Component, nodes: Iterable[tuple[TreeIdentity, Node, bytes]]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return (device, host): two dicts with the expected content of each page of the tree."""
        pool, index = component.pool, component.index
        offered: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for place, node, prefix in nodes:
            for tier in (DEVICE, HOST):
                run = node.pages(tier, index)
                if run is None:
                    continue
                contents = self._contents_of(pool, place, node.width, prefix)
                if len(run) != len(contents):
                    has = f"has {len(run)} of {pool}"
                    raise Violated(f"node {node.id} of {node.width} pages {has}")
                if len(set(run)) < len(run) or not offered[tier].keys().isdisjoint(run):
                    twice = next(
                        p for at, p in enumerate(run) if p in offered[tier] or p in run[:at]
                    )
                    slot = f"{TIER_NAMES[tier]} {pool} page {twice}"
                    raise Violated(f"{slot} is in two cached prefixes")
                offered[tier].update(zip(run, contents, strict=True))
        return offered

    def _contents_of(self, pool: str, place: TreeIdentity, width: int, prefix: bytes) -> list[int]:
        """Return the expected contents of a tree node's pages in one pool.

        The node is `width` pages long and ends at the end of `prefix`. A recurrent state is a single
        page, whatever the node's width.
        """
        name = (pool, place.namespace, place.generation, width, prefix)
        known = self._known.get(name)
        if known is None:
            first = width if pool in self._states else 1
            ends = range(len(prefix) - (width - first) * self._page_bytes, len(prefix) + 1)
            known = self._known[name] = [
                self._contents.of(place.namespace, prefix[:end], place.generation, pool=pool)
                for end in ends[:: self._page_bytes]
            ]
        return known


def _below(root: Node) -> Iterator[tuple[TreeIdentity, Node, bytes]]:
    """Yield (tree's identity, node, tokens from the root to the node's end) for nodes below `root`."""
    waiting: list[tuple[Node, bytes]] = [(root, b"")]
    for node, above in waiting:
        for child in node.children.values():
            prefix = above + child.tokens
            waiting.append((child, prefix))
            yield root.place, child, prefix


def _check_offered(slots: Slots, offered: Mapping[int, int]) -> None:
    held, shard, writer = slots.content, slots.shard, slots.writer
    for page, content in offered.items():
        if held[page] != content + shard:
            offered_as, found = describe(content + shard), describe(held[page])
            raise Violated(f"{_offers(slots, page)} as {offered_as}, but it holds {found}")
        if writer[page] is not None:
            raise Violated(f"{_offers(slots, page)}, which a transfer may still write")


def _offers(slots: Slots, page: int) -> str:
    return f"rank {slots.rank}: the tree offers {slots.slot(page)}"


class DeadlineChecker:
    """Checks that every operation ends within a bounded virtual time, even if storage hangs."""

    def __init__(self, config: RankCacheConfig, *, step_us_max: int, still_us: int) -> None:
        """Create the checker; `still_us` is the maximum total time that clock faults add."""
        times = config.timeouts
        waits_s = config.stop_policy.cap_s + still_us / 1_000_000
        self._limits_s = {
            (OperationKind.PREFETCH, Phase.WAITING): waits_s,
            (OperationKind.PREFETCH, Phase.QUERY): times.lookup_s,
            (OperationKind.PREFETCH, Phase.RESTORABLE): _STEPS_TO_AGREE * step_us_max / 1_000_000,
            (OperationKind.PREFETCH, Phase.TRANSFER): config.stop_policy.cap_s,
            (OperationKind.BACKUP, Phase.ISSUED): times.copy_s,
            (OperationKind.LOAD_BACK, Phase.ISSUED): times.copy_s,
            (OperationKind.RETRACT, Phase.ISSUED): times.copy_s,
            (OperationKind.RESUME, Phase.ISSUED): times.copy_s,
            (OperationKind.PERSIST, Phase.ISSUED): times.persist_s,
            **{(kind, Phase.QUIESCE): times.quiesce_s for kind in OperationKind},
        }
        self._step_us_max = step_us_max
        self._since: dict[int, tuple[Phase, int]] = {}

    def begin_epoch(self) -> None:
        """Forget the operations of the previous epoch."""
        self._since.clear()

    def check(self, cache: RankCache, now_us: int) -> None:
        """Raise if an operation has been in its current phase for longer than allowed."""
        table = cache.inspection.in_flight
        since = self._since
        # Allow extra steps: at most one failed operation per queue settles in a round, and progress
        # reports may arrive late.
        slack_us = LATE_US_MAX + (len(table) + 6) * self._step_us_max
        current: dict[int, tuple[Phase, int]] = {}
        for operation in table.values():
            before = since.get(operation.id)
            if before is None or before[0] is not operation.phase:
                before = (operation.phase, now_us)
            current[operation.id] = before
            limit_s = self._limits_s.get((operation.kind, operation.phase))
            if limit_s is not None and now_us - before[1] > limit_s * 1_000_000 + slack_us:
                stood_s = (now_us - before[1]) / 1e6
                raise Violated(
                    f"{operation.kind.name} {operation.id} has been in {operation.phase.name} for"
                    f" {stood_s:.3f} s, its limit is {limit_s} s"
                )
        self._since = current


class ReplicaChecker:
    """Checks each replica's invariants, and that the replicas of all ranks are equal."""

    def __init__(self, caches: Sequence[RankCache]) -> None:
        self._caches = caches
        self._checked: int | None = None
        """The replicas' rolling digest at the last check of the invariants; None before the first."""

    def check(self, step: int, *, thorough: bool) -> None:
        """Compare the replicas' rolling digests; check invariants if the digest has changed.

        One rank's invariants are checked, a different rank in each step. A `thorough` check compares
        the whole states, and checks every rank's invariants even if the digest has not changed.
        """
        caches = self._caches
        digests = [cache.inspection.digest for cache in caches]
        if len(set(digests)) > 1:
            raise Violated(f"the rolling digests differ: {digests}")
        if thorough:
            self._check_invariants(range(len(caches)))
            states = [cache.inspection.state_digest for cache in caches]
            if len(set(states)) > 1:
                raise Violated(f"the states differ, but the rolling digests are equal: {states}")
        elif digests[0] != self._checked:
            self._check_invariants([step % len(caches)])
        self._checked = digests[0]

    def _check_invariants(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._caches[rank].inspection.check()
            except InvariantViolation as broken:
                what = f"invariant {broken.number}: {broken.sentence}"
                raise Violated(f"rank {rank}: {what}") from broken


def check_time(cache: RankCache, clocks_ms: Sequence[int]) -> None:
    """Raise if the agreed time is later than some rank's clock."""
    agreed_ms, first_ms = cache.inspection.agreed_ms, min(clocks_ms)
    if agreed_ms > first_ms:
        rank = clocks_ms.index(first_ms)
        raise Violated(
            f"the agreed time is {agreed_ms} ms, ahead of rank {rank}'s clock at {first_ms} ms"
        )


_WAITS = (LoadState.LOADING, LoadState.SAVING)


def check_loads(cache: HostCache) -> None:
    """Raise if a load is quarantined, or if a request waits for a load that has ended.

    Loads fill engine-owned pages, which the cache cannot quarantine.
    """
    in_flight = cache.inspection.in_flight
    for operation in in_flight.values():
        loads = operation.kind in (OperationKind.LOAD_BACK, OperationKind.RESUME)
        if loads and operation.phase is Phase.QUARANTINED:
            raise Violated(
                f"load {operation.id} is quarantined, but its pages belong to the engine"
            )
    for request in cache.inspection.requests:
        if request.waits_for is not None and request.waits_for not in in_flight:
            waited = f"load {request.waits_for}"
            raise Violated(f"request {request.id} waits for {waited}, which is gone")
        if cache.inspection.idle and cache.load_state(request.id) in _WAITS:
            raise Violated(f"request {request.id} waits for a copy, which is gone")


def check_at_rest(
    cache: RankCache, memories: Sequence[SymbolicMemory], restless: Iterable[set[int]]
) -> None:
    """Raise if a drained group has leaked pages or locks, or an operation that should have ended.

    Only operations whose I/O never completes may be in flight, and they must be quarantined; `restless`
    has their ids by rank.
    """
    counted = cache.stats(rounds=0).replica
    found = sum(counted.hit_tokens.values()) + sum(counted.missed_tokens.values())
    if found != counted.asked_tokens:
        raise Violated(f"{counted.asked_tokens} tokens were requested, but {found} hit or missed")
    in_flight = cache.inspection.in_flight
    never_quiet = set[int]().union(*restless)
    for operation in in_flight.values():
        if operation.phase is not Phase.QUARANTINED:
            name = f"{operation.kind.name} {operation.id}"
            raise Violated(f"{name} is still in {operation.phase.name} at rest")
    for number in in_flight:
        if number not in never_quiet:
            state = "quarantined without I/O in flight"
            raise Violated(f"operation {number} is {state} at rest")
    if not in_flight:
        for node in cache.inspection.prefixes.tree.nodes():
            for tier in (DEVICE, HOST):
                if node.is_held_on(tier):
                    raise Violated(f"node {node.id} is held on the {TIER_NAMES[tier]} at rest")
    for tier in (DEVICE, HOST):
        for component in cache.inspection.prefixes.components:
            slots = [memory.tiers[tier][component.pool] for memory in memories]
            _check_pool_at_rest(cache, tier, component.index, slots)


def _check_pool_at_rest(
    cache: RankCache, tier: int, component: int, slots: Sequence[Slots]
) -> None:
    """Raise unless each page of a pool is free, in the tree or quarantined.

    No transfer may access a free page on any rank; `slots` are the pool's page slots by rank.
    """
    prefixes = cache.inspection.prefixes
    pool = prefixes.allocator.pools[tier][component]
    runs = [node.pages(tier, component) for node in prefixes.tree.nodes()]
    in_tree = sum(len(run) for run in runs if run is not None)
    in_flight = cache.inspection.in_flight.values()
    quarantined = sum(len(each.owned_pages(tier, component)) for each in in_flight)
    if pool.free + in_tree + quarantined != pool.capacity:
        name = f"{TIER_NAMES[tier]} {prefixes.components[component].pool}"
        raise Violated(
            f"{pool.free} {name} pages are free, {in_tree} in the tree and {quarantined} in"
            f" quarantine, of {pool.capacity}"
        )
    for each in slots:
        for page in pool.free_pages():
            if each.touched(page):
                raise Violated(each.touched_although(page, "it is free"))
