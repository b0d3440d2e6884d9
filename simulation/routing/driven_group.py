"""A group whose requests are drawn: one real replica, its ballot and its events, and no bytes.

One rank stands for all of them, since equal commands and verdicts give equal replicas.
"""

import random
from array import array
from collections.abc import Mapping

from ...coordinator.ballot import Answered, Ballot, Capped, Ended, Landed, Progress, Quiesced
from ...coordinator.lanes import BallotShape, LaneLayout, Voter
from ...coordinator.verdict import Verdicts
from ...errors import UsageError
from ...ranks.config import Bounds, NamespaceLimit, WritePolicy
from ...ranks.disaggregation.groups.kv_events import TIERS, EventBatch, KVEventPublisher
from ...ranks.orders import Cancel, CopyToDevice, CopyToHost, Fetch, LookUp, Order, Put
from ...ranks.replica.answers import Admission
from ...ranks.replica.effects import Effects
from ...ranks.replica.notices import Tier
from ...ranks.replica.replica import Replica
from ...ranks.replica.requests import LoadState
from ...ranks.replica.settings import ComponentSettings, ReplicaConfig
from ...ranks.replica.tree.tree import Tree

PAGE_TOKENS = 2
_TOKEN_BYTES = 4
_PROMPT_PAGES_MAX = 8
_SEATS = 4
_NAMESPACES = ("", "tenant")

Held = Mapping[Tier, frozenset[bytes]]
"""The keys of pages by tier."""


def held_in(tree: Tree) -> Held:
    """Return the keys of all pages of full attention that a replica's tree has."""
    held: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
    for node in tree.nodes():
        for tier, values in zip(TIERS, node.values, strict=True):
            if values[0] is not None:
                held[tier].update(tree.keys(node))
    return {tier: frozenset(keys) for tier, keys in held.items()}


def outcome(order: Order, *, short: bool) -> tuple[Progress, ...]:
    """Return what is reported of an order that is carried out in full, or one page short."""
    match order:
        case LookUp():
            return (Answered(order.operation, len(order.needs[0].keys) - short),)
        case Fetch():
            pages = sum(len(each.keys) for each in order.transfers)
            if short:
                return Landed(order.operation, pages - 1), Capped(order.operation, pages - 1)
            return (Landed(order.operation, pages),)
        case CopyToHost() | CopyToDevice() | Put():
            return (Ended(order.operation, ok=not short),)
        case Cancel():
            return (Quiesced(order.operation),)
        case _:
            return ()


class DrivenGroup:
    """One life of a group."""

    def __init__(self, life: int, draw: random.Random) -> None:
        self._draw = draw
        self.replica = Replica(_config(draw))
        self.publisher = KVEventPublisher(life=life, replay_pages_max=draw.choice((4, 40, 400)))
        self.had: dict[int, Held] = {-1: held_in(self.replica.prefixes.tree)}
        """What the tree had after each batch of events."""
        self._shape = BallotShape(world_size=1, seats=_SEATS)
        self._ballot, self._verdicts = Ballot(self._shape, 0), Verdicts(self._shape)
        self._orders: list[Order] = []
        self._rounds = self._named = 0
        self._open: dict[str, bytes] = {}
        """The requests that are under way, and their tokens."""

    def act(self) -> list[EventBatch]:
        """Do one drawn thing; return the batches of events that it has caused."""
        kind = self._draw.random()
        if kind < 0.01:
            versions = (None, "v1", "v2")
            return self._follow(self.replica.reset(self._draw.choice(versions))[1])
        if kind < 0.45:
            return self._round()
        if kind < 0.68 and self._open:
            return self._leave(self._draw.choice(sorted(self._open)))
        return self._come()

    def prompt(self) -> tuple[str, bytes]:
        """Draw a namespace and a prompt; many begin alike."""
        pages = self._draw.randint(1, _PROMPT_PAGES_MAX)
        tokens = array("i")
        for at in range(pages):
            tokens.extend([at, self._draw.choice((0, 0, 0, 1))])
        return self._draw.choice(_NAMESPACES), tokens.tobytes()

    def _come(self) -> list[EventBatch]:
        self._named += 1
        name = f"r{self._named}"
        namespace, tokens = self.prompt()
        if self._draw.random() < 0.3:
            batches = self._follow(self.replica.prefetch(name, namespace, tokens)[1])
            self._open[name] = tokens
            return batches
        return self._admit(name, namespace, tokens)

    def _admit(self, name: str, namespace: str, tokens: bytes) -> list[EventBatch]:
        total = len(tokens) // _TOKEN_BYTES
        try:
            answer, effects = self.replica.load_back(
                name, namespace, tokens[:-_TOKEN_BYTES], total, self._draw.randrange(2)
            )
        except UsageError:
            # It is longer than a pool; so is no other's fault.
            return []
        batches = self._follow(effects)
        if isinstance(answer, Admission):
            self._open[name] = tokens
        else:
            batches += self._follow(self.replica.release(name)[1])
        return batches

    def _leave(self, name: str) -> list[EventBatch]:
        """Let a request that is ready be computed, and let it leave in any case."""
        tokens = self._open.pop(name)
        batches: list[EventBatch] = []
        request = self.replica.requests.get(name)
        if request is not None and request.admitted:
            ready = self.replica.load_state(name) is LoadState.READY
            if ready and self._draw.random() < 0.9:
                batches += self._follow(self.replica.insert(name, tokens, final=True)[1])
        return batches + self._follow(self.replica.release(name)[1])

    def _round(self) -> list[EventBatch]:
        """Let some of what was ordered end, well or not, and apply what follows."""
        kept: list[Order] = []
        for order in self._orders:
            if self._draw.random() < 0.3:
                kept.append(order)
                continue
            for progress in outcome(order, short=self._draw.random() < 0.1):
                self._ballot.note(progress)
        self._orders = kept
        self._rounds += 1
        layout = LaneLayout(
            epoch=1,
            round=self._rounds,
            state_digest=self.replica.digest,
            seats=self.replica.seats(),
        )
        row = self._ballot.fill(layout, Voter(healthy=True, time_ms=1000 * self._rounds))
        return self._follow(self.replica.apply(self._verdicts.read(layout, row)))

    def _follow(self, effects: Effects) -> list[EventBatch]:
        self._ballot.follow(effects.expectations)
        self._orders += effects.orders
        batch = self.publisher.fold(effects.notices)
        if batch is None:
            return []
        self.had[batch.sequence] = held_in(self.replica.prefixes.tree)
        return [batch]


def _config(draw: random.Random) -> ReplicaConfig:
    window = ComponentSettings(
        kind="sliding_window", pool="window", device_pages=10, host_pages=10, every_pages=2
    )
    limit = NamespaceLimit(namespace="tenant", device_pages=5, host_pages=6)
    return ReplicaConfig(
        page_tokens=PAGE_TOKENS,
        device_pages=draw.choice((9, 14, 24)),
        host_pages=draw.choice((0, 9, 20)),
        components=draw.choice(((), (), (window,))),
        has_store=draw.random() < 0.7,
        model_digest=b"model",
        life=draw.randbytes(16),
        write_policy=draw.choice(list(WritePolicy)),
        limits=draw.choice(((), (), (limit,))),
        names_pages=True,
        bounds=Bounds(prefetches=_SEATS),
    )
