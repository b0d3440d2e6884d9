"""Schedules in which KV events are lost, repeated and late: does the index say what the replicas have?

    python -m lockstep.simulation.routing.event_schedules 17        # or 0:1000

Groups of real replicas are driven by drawn requests. What they tell travels through a channel that
loses, repeats and delays it; so do the answers to a reader that asks for what it lacks. Whenever the
index says that it is exact, it has what the replica's tree had after that batch, tier by tier; and
once the channel lets everything through, one answer later it is exact again.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...ranks.disaggregation.groups.kv_events import TIERS, EventBatch, Snapshot
from ...ranks.disaggregation.groups.prefix_index import Hit, PrefixIndex
from ...ranks.replica.tree.page_keys import page_keys
from ..checkers.findings.finding import Violated
from ..checkers.findings.routing import HitsDiffer, IndexDiffers, StaysUnknown
from .driven_group import PAGE_TOKENS, DrivenGroup, Held, held_in

STEPS = 200
GROUPS = 2

REPLAY = "python -m lockstep.simulation.routing.event_schedules {seed}"


@dataclass(frozen=True, slots=True)
class _Level:
    """A group says how far it is."""

    life: int
    sequence: int


Message = EventBatch | Snapshot | _Level


class EventSchedule:
    """One schedule, which its seed determines."""

    def __init__(self, seed: int, index: Callable[[], PrefixIndex] = PrefixIndex) -> None:
        """`index` makes what is tested."""
        self._draw = random.Random(seed)
        self._index = index()
        self._lives: dict[str, list[DrivenGroup]] = {
            f"group-{number}": [DrivenGroup(0, self._draw)] for number in range(GROUPS)
        }
        self._on_their_way: list[tuple[str, Message]] = []
        self._lossy = self._draw.choice((0.0, 0.05, 0.3))
        self._prompt = self._draw.choice((0.1, 0.4, 0.9))
        """How likely what is on its way is to come now."""
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Run the schedule; return how often things have happened. Raises `Violated`."""
        for _ in range(STEPS):
            name = self._draw.choice(sorted(self._lives))
            self._act(name)
            self._deliver_some()
            if self._draw.random() < 0.3:
                self._ask(name)
        self._settle()
        return self.counts

    def _act(self, name: str) -> None:
        lives = self._lives[name]
        if self._draw.random() < 0.01:
            lives.append(DrivenGroup(len(lives), self._draw))
            self.counts["lives"] += 1
        group = lives[-1]
        for batch in group.act():
            self.counts["batches"] += 1
            self.counts.update(type(event).__name__ for event in batch.events)
            self._send(name, batch)
        if self._draw.random() < 0.1:
            self._send(name, _Level(group.publisher.life, group.publisher.last_sequence))

    def _send(self, name: str, message: Message) -> None:
        fate = self._draw.random()
        if fate < self._lossy:
            self.counts["lost"] += 1
            return
        self._on_their_way.append((name, message))
        if fate > 1 - self._lossy:
            self.counts["repeated"] += 1
            self._on_their_way.append((name, message))

    def _deliver_some(self) -> None:
        while self._on_their_way and self._draw.random() < self._prompt:
            in_order = self._draw.random() < 0.7
            at = 0 if in_order else self._draw.randrange(len(self._on_their_way))
            self.counts["late"] += at > 0
            self._deliver(*self._on_their_way.pop(at))

    def _deliver(self, name: str, message: Message) -> None:
        match message:
            case EventBatch():
                self._index.apply(name, message)
            case Snapshot():
                self._index.restore(name, message)
            case _Level():
                self._index.heard(name, message.life, message.sequence)
        self._check(name)

    def _ask(self, name: str) -> None:
        """Let the reader ask for what it lacks, if it knows that it lacks anything."""
        if not self._index.standing(name).exact:
            for message in self._answer(name):
                self._send(name, message)

    def _answer(self, name: str) -> Iterable[Message]:
        publisher = self._lives[name][-1].publisher
        standing = self._index.standing(name)
        missed = publisher.since(standing.through) if standing.life == publisher.life else None
        if missed is None:
            self.counts["snapshots"] += 1
            return [publisher.snapshot()]
        self.counts["replays"] += 1
        return missed

    def _check(self, name: str) -> None:
        standing = self._index.standing(name)
        if not standing.exact:
            self.counts["unknown"] += 1
            self._check_hits(name, self._lives[name][-1], exact=False)
            return
        self.counts["exact"] += 1
        group = self._lives[name][standing.life]
        self._compare(name, group.had[standing.through], standing.through)
        self._check_hits(name, group, exact=True)

    def _compare(self, name: str, true: Held, through: int) -> None:
        held = self._index.held(name)
        too_many = sum(len(held[tier] - true[tier]) for tier in TIERS)
        too_few = sum(len(true[tier] - held[tier]) for tier in TIERS)
        if too_many or too_few:
            raise Violated(IndexDiffers(name, through, too_many, too_few))

    def _check_hits(self, name: str, group: DrivenGroup, *, exact: bool) -> None:
        """Hold a query against what is held; a group that is unknown has no hit."""
        namespace, tokens = group.prompt()
        requests, tree = group.replica.requests, group.replica.prefixes.tree
        root = tree.roots.get(requests.place(namespace))
        if root is None:
            return
        keys = page_keys(tree.keys(root)[-1], tokens, PAGE_TOKENS)
        held = self._index.held(name)
        on_device, on_host = (held[tier] if exact else frozenset[bytes]() for tier in TIERS)
        true = Hit(_run(keys, on_device | on_host), _run(keys, on_device))
        said = self._index.hits(keys).get(name, Hit(0, 0))
        self.counts["hits"] += said.pages > 0
        if said != true:
            raise Violated(HitsDiffer(name, said, true))

    def _settle(self) -> None:
        """Let nothing be lost any more: what was late comes, and one answer to each group's reader."""
        for name, message in self._on_their_way:
            self._deliver(name, message)
        for name, lives in self._lives.items():
            publisher = lives[-1].publisher
            self._deliver(name, _Level(publisher.life, publisher.last_sequence))
            if not self._index.standing(name).exact:
                for message in self._answer(name):
                    self._deliver(name, message)
            if not self._index.standing(name).exact:
                raise Violated(StaysUnknown(name))
            self._compare(name, held_in(lives[-1].replica.prefixes.tree), publisher.last_sequence)


def _run(keys: Iterable[bytes], held: frozenset[bytes]) -> int:
    """Return how many of the keys are held, up to the first that is not."""
    length = 0
    for key in keys:
        if key not in held:
            break
        length += 1
    return length


def run_event_schedules(
    seeds: Iterable[int], index: Callable[[], PrefixIndex] = PrefixIndex
) -> Counter[str]:
    """Run a schedule for each seed. Prints the command that replays the first that fails."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += EventSchedule(seed, index).run()
        except Exception as error:
            print(f"seed {seed}: {error}\n  replay: {REPLAY.format(seed=seed)}")
            raise
    return counts


def main() -> None:
    """Run the schedules that the command line names."""
    first, _, last = (sys.argv[1] if len(sys.argv) > 1 else "0:1000").partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    counts = run_event_schedules(seeds)
    print(
        f"{len(seeds)} schedules: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    )


if __name__ == "__main__":
    main()
