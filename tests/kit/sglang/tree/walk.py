"""Makes random sequences of scheduler actions on requests, on all ranks of a group.

Each action runs on all ranks concurrently. Afterwards all ranks must agree on the answer, the device
sizes and the state digest.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from lockstep.ranks.protocol.orders import Direction
from tests.kit.sglang.tree.rig import Rig
from tests.kit.sglang.tree.rigs import Rigs

T = TypeVar("T")

RUNNING_MAX, WAITING_MAX = 4, 6
TURNS_MAX = 100
"""Largest number of scheduler iterations within which all requests must finish."""


@dataclass(slots=True, eq=False)
class Walker:
    """One request, with its request object on each rank."""

    requests: list[Any]
    tokens: int

    @property
    def request(self) -> Any:
        """Return rank 0's request object."""
        return self.requests[0]


@dataclass(slots=True)
class Walk:
    """A random sequence of actions on a group. `wrong` collects violations and must stay empty."""

    rigs: Rigs
    seed: int
    waiting: list[Walker] = field(default_factory=list[Walker])
    running: list[Walker] = field(default_factory=list[Walker])
    wrong: list[str] = field(default_factory=list[str])
    served: int = 0
    _held: ExitStack = field(default_factory=ExitStack)

    def run(self, moves: int) -> None:
        """Make `moves` random actions, then finish every request."""
        drawn = Random(self.seed)
        last, fails = self.rigs.ranks[-1], Random(self.seed)
        failing = last.copies_failing(Direction.TO_DEVICE, lambda: fails.random() < 0.2)
        with failing, self._held:
            self._make(moves, drawn)

    def _make(self, moves: int, drawn: Random) -> None:
        kinds = (
            [self._arrive] * 3
            + [self._step] * 6
            + [self._admit] * 6
            + [self._extend] * 4
            + [self._generate] * 3
            + [self._end] * 2
            + [self._retract, self._abort, self._evict, self._reset, self._hold, self._let_go]
        )
        for move in range(moves):
            kind = drawn.choice(kinds)
            kind(drawn)
            self._compare(f"move {move}, {kind.__name__}")
        self._let_go(drawn)
        for _ in range(TURNS_MAX):
            for kind in (self._extend, self._end, self._step, self._admit):
                kind(drawn)
        self.wrong += [f"{each.request.rid} does not end" for each in self.running + self.waiting]
        self.rigs.settled()
        self._compare("the end")
        self.wrong += [
            f"slots are lost: {each}"
            for each in self._every(lambda rig: rig.all_lost())
            if any(each)
        ]

    def _every(self, command: Callable[[Rig], T]) -> list[T]:
        return self.rigs.every(command)

    def _each(self, walker: Walker, command: Callable[[Rig, Any], T]) -> list[T]:
        return self._every(lambda rig: command(rig, walker.requests[rig.rank]))

    def _compare(self, when: str) -> None:
        sizes = self._every(lambda rig: (rig.sizes(), rig.cache.lockstep_state()["digest"]))
        if len(set(sizes)) > 1:
            self.wrong.append(f"{when}: ranks differ in {sizes}")

    def _step(self, drawn: Random) -> None:
        self._every(lambda rig: rig.step())

    def _arrive(self, drawn: Random) -> None:
        if len(self.waiting) >= WAITING_MAX:
            return
        stem, branch = drawn.randrange(3), drawn.randrange(4)
        tokens = [*range(100 * stem, 100 * stem + drawn.randrange(4, 30))]
        tokens += range(1000 + 100 * branch, 1000 + 100 * branch + drawn.randrange(1, 20))
        keys = {"cache_salt": "other"} if drawn.random() < 0.2 else {}
        requests = self._every(lambda rig: rig.request(tokens, **keys))
        self.waiting.append(Walker(requests, len(tokens)))

    def _admit(self, drawn: Random) -> None:
        if not self.waiting or len(self.running) >= RUNNING_MAX:
            return
        walker = drawn.choice(self.waiting)
        if not self._has_room(walker.tokens + 8):
            self._retract(drawn)
            return
        admitted = self._each(walker, lambda rig, request: rig.admit(request))
        if len(set(admitted)) > 1:
            self.wrong.append(f"ranks have admitted {admitted}")
        if all(admitted):
            self.waiting.remove(walker)
            self.running.append(walker)
            self.served += 1
            self._check(walker)

    def _extend(self, drawn: Random) -> None:
        walker = self._drawn(drawn, lambda each: _is_left(each) > 0)
        if walker is None or not self._has_room(_is_left(walker) + 8):
            return
        done = walker.request.kv.kv_committed_len
        end = min(walker.tokens, done + drawn.choice([4, 8, 12, 100]))
        self._each(walker, lambda rig, request: rig.extend(request, end))
        self._check(walker)

    def _generate(self, drawn: Random) -> None:
        walker = self._drawn(drawn, lambda each: _is_left(each) == 0)
        if walker is None or not self._has_room(12):
            return
        answer = [drawn.randrange(5000, 5003) for _ in range(drawn.randrange(1, 6))]
        self._each(walker, lambda rig, request: rig.generate(request, answer))
        walker.tokens += len(answer)

    def _end(self, drawn: Random) -> None:
        walker = self._drawn(drawn, _has_computed)
        if walker is None:
            return
        keep = drawn.random() < 0.8
        self._check(walker)
        self._each(walker, lambda rig, request: rig.end(request, checkpoint=keep))
        self.running.remove(walker)

    def _retract(self, drawn: Random) -> None:
        # Unblock copies first, because the retraction of a request waits for the request's copy.
        self._let_go(drawn)
        walker = self._drawn(drawn, _has_computed)
        if walker is None:
            return
        self._each(walker, lambda rig, request: rig.retract(request))
        self.running.remove(walker)
        self.waiting.append(walker)
        self._every(lambda rig: rig.spoil())

    def _abort(self, drawn: Random) -> None:
        if self.waiting:
            walker = drawn.choice(self.waiting)
            self._each(walker, lambda rig, request: rig.abort(request))
            self.waiting.remove(walker)

    def _evict(self, drawn: Random) -> None:
        tokens = drawn.randrange(4, 120)
        self._every(lambda rig: rig.evict(tokens))
        self._every(lambda rig: rig.spoil())

    def _reset(self, drawn: Random) -> None:
        if self.running or self.waiting or drawn.random() < 0.5:
            return
        self._let_go(drawn)
        self._every(lambda rig: rig.cache.reset())
        self._every(lambda rig: rig.allocator.clear())
        # Clear the request tables as well, which frees the state slots.
        self._every(lambda rig: rig.rows.clear())
        self._every(lambda rig: rig.spoil())

    def _hold(self, drawn: Random) -> None:
        """Block rank 0's copies in a random direction. The other ranks then have to wait for rank 0."""
        self._let_go(drawn)
        direction = drawn.choice(list(Direction))
        self._held.enter_context(self.rigs.ranks[0].copies_held(direction))

    def _let_go(self, drawn: Random) -> None:
        self._held.close()

    def _drawn(self, drawn: Random, wanted: Callable[[Walker], bool]) -> Walker | None:
        found = [each for each in self.running if wanted(each)]
        return drawn.choice(found) if found else None

    def _has_room(self, tokens: int) -> bool:
        available, evictable, _ = self.rigs.ranks[0].sizes()
        return available + evictable >= tokens

    def _check(self, walker: Walker) -> None:
        for rank, wrong in enumerate(self._each(walker, lambda rig, each: rig.wrong_of(each))):
            self.wrong += [f"{walker.request.rid} of rank {rank} has other bytes: {wrong}"] * bool(
                wrong
            )


def _is_left(walker: Walker) -> int:
    left: int = walker.tokens - walker.request.kv.kv_committed_len
    return left


def _has_computed(walker: Walker) -> bool:
    return bool(walker.request.kv.kv_committed_len)
