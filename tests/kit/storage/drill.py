"""Random calls to a store under injected faults, and what has to be true of what comes of them."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from random import Random

from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.wrappers.around import Call
from lockstep.storage_backends.wrappers.fault import Fault, FaultBackend, FaultPlan
from lockstep.storage_backends.wrappers.metrics import MetricsBackend
from tests.kit.storage.calls import EVERY, columns, full_page, object_name, using

NAMES = 40
BATCH_MAX = 12
PAGE_BYTES = 3000
"""What every engine keeps of a page; small and odd, since the faults are what takes the time."""
CALL_TIMEOUT_S = 20.0
"""A call that takes this long hangs: its deadline is earlier, and the waits of faults are virtual."""
RATES: Mapping[Fault, float] = {
    Fault.DELAY: 0.1,
    Fault.ERROR: 0.08,
    Fault.TIMEOUT: 0.05,
    Fault.LOST: 0.1,
    Fault.LIE: 0.1,
    Fault.FLIP: 0.12,
    Fault.TORN: 0.12,
    Fault.SHORT: 0.12,
    Fault.WRONG: 0.12,
}
DAMAGES = (Fault.FLIP, Fault.TORN, Fault.SHORT, Fault.WRONG)


@dataclass
class Model:
    """What may be stored: for each part of each name the authors of its bytes, as outcomes tell.

    A name that has been removed or found empty has none until somebody writes it again. A write
    whose outcome leaves it open adds its author; a read that is OK tells who it is.
    """

    authors: dict[int, dict[int, set[int]]] = field(
        default_factory=lambda: {number: defaultdict(set) for number in range(NAMES)}
    )

    def wrote(self, number: int, present: int, author: int, outcome: WriteOutcome) -> None:
        if outcome in (WriteOutcome.OK, WriteOutcome.TIMED_OUT):
            for part in parts_of(present):
                self.authors[number][part].add(author)

    def read(self, number: int, present: int, outcome: ReadOutcome, content: bytearray) -> None:
        possible = self.authors[number]
        if outcome is ReadOutcome.OK:
            for part, place in parts_of(present).items():
                possible[part] = {
                    author
                    for author in possible[part]
                    if bytes(content[place]) == content_of(author, present)[place]
                }
                assert possible[part], f"name {number} was served with bytes that were not its own"
        elif outcome in (ReadOutcome.MISSING, ReadOutcome.CORRUPT):
            possible.clear()

    def removed(self, number: int, free: bool) -> None:
        if free:
            self.authors[number].clear()


@cache
def parts_of(present: int) -> Mapping[int, slice]:
    """The parts of a page with these columns, and where they lie in it."""
    shape = shape_of(present)
    ends = list(accumulate((shape.parts[number].nbytes for number in shape.held), initial=0))
    places = [slice(start, end) for start, end in pairwise(ends)]
    return dict(zip(shape.held, places, strict=True))


@cache
def content_of(author: int, present: int) -> bytes:
    return bytes(full_page(present, author, PAGE_BYTES))


@cache
def shape_of(present: int) -> ObjectShape:
    return columns(present, PAGE_BYTES)


@dataclass
class Drill:
    """Random calls to one store through fault injection, until there were enough faults.

    With `whole`, all objects have the same parts and every reader reads all of them, so that each
    damage is found by the very read that it was made for.
    """

    store: StorageBackend
    seed: int
    whole: bool
    model: Model = field(default_factory=Model)
    calls: int = 0
    virtual_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        plan = FaultPlan(seed=self.seed, rates=RATES)
        self.fault = FaultBackend(self.store, plan, sleep=self.pass_time)
        self.backend = MetricsBackend(self.fault)

    async def pass_time(self, duration_s: float) -> None:
        self.virtual_s += duration_s
        await asyncio.sleep(0)

    async def run(self, faults: int) -> None:
        async with using(self.backend):
            while self.fault.injected().total() < faults:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self.one_call()
                self.calls += 1

    async def one_call(self) -> None:
        numbers = self.random.sample(range(NAMES), self.random.randint(1, BATCH_MAX))
        names = [object_name(number) for number in numbers]
        deadline = time.monotonic() + CALL_TIMEOUT_S / 2
        match self.random.choices(["write", "read", "exists", "remove"], [5, 6, 1, 0.5])[0]:
            case "write":
                await self.write(numbers, names, deadline)
            case "read":
                await self.read(numbers, names, deadline)
            case "exists":
                assert len(await self.backend.exists(names, deadline=deadline)) == len(names)
            case _:
                freed = await self.backend.remove(names, deadline=deadline)
                for number, free in zip(numbers, freed, strict=True):
                    self.model.removed(number, free)

    async def write(self, numbers: list[int], names: list[ObjectName], deadline: float) -> None:
        authors = [self.random.randint(1, 50) for _ in numbers]
        present = [self.draw_columns() for _ in numbers]
        writes = [
            Write(name, (memoryview(content_of(author, bits)),), shape_of(bits))
            for name, author, bits in zip(names, authors, present, strict=True)
        ]
        outcomes = await self.backend.write(writes, deadline=deadline)
        for each in zip(numbers, present, authors, outcomes, strict=True):
            self.model.wrote(*each)

    async def read(self, numbers: list[int], names: list[ObjectName], deadline: float) -> None:
        present = [self.draw_columns() for _ in numbers]
        shapes = [shape_of(bits) for bits in present]
        buffers = [bytearray(shape.nbytes) for shape in shapes]
        reads = [
            Read(name, (memoryview(buffer),), shape)
            for name, buffer, shape in zip(names, buffers, shapes, strict=True)
        ]
        outcomes = await self.backend.read(reads, deadline=deadline)
        for each in zip(numbers, present, outcomes, buffers, strict=True):
            self.model.read(*each)

    def draw_columns(self) -> int:
        return 0 if self.whole else self.random.randint(0, EVERY)


def check_counts(run: Drill) -> None:
    """What was injected is what was seen, under the same names, where one follows from the other."""
    injected, seen, below = run.fault.injected(), run.backend.log.metrics(), run.store.counters()
    reads, writes = Counter(seen[Call.READ].outcomes), Counter(seen[Call.WRITE].outcomes)
    assert reads["failed"] == injected.reads[Fault.ERROR]
    assert reads["timed_out"] == injected.reads[Fault.TIMEOUT]
    assert writes["failed"] == injected.writes[Fault.ERROR]
    assert writes["timed_out"] == injected.writes[Fault.TIMEOUT]
    assert reads["corrupt"] == below.reads_corrupt
    if run.whole:
        assert reads["corrupt"] == sum(injected.reads[kind] for kind in DAMAGES)
        assert reads["lacking"] == 0
    stored = writes["ok"] + writes["present"] - injected.writes[Fault.LOST]
    carried_out = below.writes_ok + below.writes_present - stored
    assert 0 < carried_out < injected.writes[Fault.TIMEOUT]
    calls = (injected.reads, injected.writes, injected.existence, injected.removals)
    assert injected.total() == sum(sum(counts.values()) for counts in calls)
    for kind in Fault:
        assert injected.by_kind()[kind] > injected.total() / 200, (
            f"too few faults of the kind {kind}"
        )
    assert min(reads["ok"], writes["ok"]) > injected.total() / 10
    assert below.reads_failed == below.writes_failed == 0
    assert all(seen[call].in_flight == seen[call].interrupted == 0 for call in Call)
