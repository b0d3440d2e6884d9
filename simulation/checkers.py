"""What must be true, said independently of the code that makes it true.

The checkers know contents, not keys; they count pages themselves; and they read the replica only
where they compare it with what the memory holds or with another rank.
"""

from collections.abc import Iterable, Mapping, Sequence

from ..coordinator.operation import Kind, Phase
from ..ranks.config import CacheConfig
from ..ranks.rank_cache import RankCache
from ..ranks.replica.matching import Match
from ..ranks.replica.serving import Admission
from ..ranks.replica.tree import DEVICE, HOST, Node, Place
from .conditions import LATE_US_MAX
from .memory import Contents, Slots, describe


class Violated(Exception):
    """Something that must hold did not; the message is one sentence."""


def check_match(found: Match, tokens: int, page_tokens: int) -> None:
    """A match is whole pages, no longer than what was asked for, and the device a part of it."""
    device, host = found.device_tokens, found.host_tokens
    if device % page_tokens or host % page_tokens or not 0 <= device <= host <= tokens:
        raise Violated(f"a match of {tokens} tokens finds {found}")


def check_admission(answer: Admission, before: Match, tokens: int, page_tokens: int) -> None:
    """An admission gives at least what a match just found, and loads what is not on the device."""
    parts = (answer.device_tokens, answer.host_tokens, answer.storage_tokens)
    total = sum(parts)
    if any(part < 0 or part % page_tokens for part in parts) or total > tokens:
        raise Violated(f"an admission for {tokens} tokens says {answer}")
    if answer.device_tokens != before.device_tokens or total < before.host_tokens:
        raise Violated(f"a match found {before}, and the admission right after it says {answer}")
    if (answer.operation is None) != (total == answer.device_tokens):
        raise Violated(f"an admission loads without need, or needs without loading: {answer}")


def check_covered(who: str, covered: int, found: int, tokens: int, page_tokens: int) -> None:
    """What a backup has covered is whole pages of its tokens, and at least what a match finds."""
    if covered % page_tokens or not found <= covered <= tokens:
        raise Violated(
            f"{who}: {covered} of {tokens} tokens are on the host or on their way, and match finds "
            f"{found}"
        )


def check_hit(who: str, device: Slots, table: Sequence[int], wanted: Sequence[int]) -> None:
    """The pages that a request uses hold the content of its prefix, and nothing writes them."""
    for index, content in enumerate(wanted):
        page = table[index]
        if device.content[page] != content:
            raise Violated(
                f"{who}: device page {page} at {index} holds {describe(device.content[page])} "
                f"instead of {describe(content)}"
            )
        if device.written(page):
            raise Violated(f"{who}: device page {page} at {index} is in use and being written")


def check_expected(who: str, device: Slots, expected: Mapping[int, int]) -> None:
    """Pages of requests hold what was computed or restored into them, at every step."""
    for page, content in expected.items():
        if device.content[page] != content or device.written(page):
            raise Violated(
                f"{who}: device page {page} of a request holds {describe(device.content[page])} "
                f"instead of {describe(content)}"
            )


class TreeChecker:
    """Compares what the tree offers with what the memory of each rank holds."""

    def __init__(self, contents: Contents, page_tokens: int) -> None:
        self._contents = contents
        self._page_bytes = page_tokens * 4

    def check(self, cache: RankCache, memories: Sequence[tuple[Slots, Slots]]) -> None:
        """Every page that the tree owns holds its prefix, on every rank, and no transfer writes it.

        The replicas are equal, so the tree of one serves for all.
        """
        owners: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for place, root in cache.replica.state.tree.roots.items():
            self._collect(place, root, b"", owners)
        for rank, memory in enumerate(memories):
            for tier in (DEVICE, HOST):
                slots = memory[tier]
                for page, content in owners[tier].items():
                    if slots.content[page] != content:
                        raise Violated(
                            f"rank {rank}: the tree offers {slots.name} page {page} as "
                            f"{describe(content)}, and it holds {describe(slots.content[page])}"
                        )
                    if slots.written(page):
                        raise Violated(
                            f"rank {rank}: the tree offers {slots.name} page {page}, which a "
                            "transfer may still write"
                        )

    def _collect(
        self, place: Place, node: Node, above: bytes, owners: tuple[dict[int, int], ...]
    ) -> None:
        for child in node.children.values():
            prefix = above + child.tokens
            for tier in (DEVICE, HOST):
                run = child.pages(tier)
                if run is None:
                    continue
                for index, page in enumerate(run):
                    end = len(above) + (index + 1) * self._page_bytes
                    if page in owners[tier]:
                        raise Violated(f"the tree owns page {page} of tier {tier} twice")
                    content = self._contents.of(place.namespace, prefix[:end], place.generation)
                    owners[tier][page] = content
            self._collect(place, child, prefix, owners)


class Deadlines:
    """Every operation ends in bounded virtual time, whatever storage does."""

    def __init__(self, config: CacheConfig, *, step_us_max: int) -> None:
        times = config.timeouts
        self._limits_s = {
            (Kind.PREFETCH, Phase.WAITING): config.stop_policy.cap_s,
            (Kind.PREFETCH, Phase.QUERY): times.lookup_s,
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


def check_replicas(caches: Sequence[RankCache], *, thorough: bool) -> None:
    """The invariants hold, and the replicas are equal: by rolling digest, and from scratch."""
    for rank, cache in enumerate(caches):
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
    cache: RankCache, memories: Sequence[tuple[Slots, Slots]], restless: Iterable[set[int]]
) -> None:
    """After the drain nothing is in flight but what a store never let go of, and nothing leaked."""
    state = cache.replica.state
    in_flight = state.operations.in_flight
    never_quiet = set[int]().union(*restless)
    quarantined = 0
    for operation in in_flight.values():
        if operation.phase is not Phase.QUARANTINED:
            raise Violated(
                f"{operation.kind.name} {operation.id} is still in {operation.phase.name} at rest"
            )
        quarantined += 1
    for number in in_flight:
        if number not in never_quiet:
            raise Violated(f"operation {number} is quarantined, and every rank is quiet")
    owned = [0, 0]
    for node in state.tree.nodes():
        for tier in (DEVICE, HOST):
            run = node.pages(tier)
            owned[tier] += len(run) if run is not None else 0
            if node.holds(tier) and not quarantined:
                raise Violated(f"node {node.id} is still held {node.holds(tier)} times at rest")
    for tier, name in ((DEVICE, "device"), (HOST, "host")):
        pool = state.pools[tier]
        in_quarantine = sum(len(each.owned_pages(tier)) for each in in_flight.values())
        if pool.free + owned[tier] + in_quarantine != pool.capacity:
            raise Violated(
                f"{pool.free} {name} pages are free, {owned[tier]} in the tree and {in_quarantine} "
                f"in quarantine, of {pool.capacity}"
            )
        for rank, memory in enumerate(memories):
            for page in pool.free_pages():
                if memory[tier].touched(page):
                    raise Violated(
                        f"rank {rank}: {name} page {page} is free, and a transfer touches it"
                    )
