"""What a step costs in Python: ballot, header, verdict and replica, without any exchange.

A world of one rank, whose collective gives the vector back, and an executor that says what it is told
to. So what is measured is what every rank does in its engine's thread beside waiting for others:
while nothing changes, for each operation in flight, and for each operation that changes phase.
"""

import gc
import statistics
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from ..coordinator.ballot import Answered, Ended, Landed, Progress
from ..coordinator.collective import Vector
from ..page_format.page_layout import Column, PageLayout
from ..ranks.cache import Cache
from ..ranks.config import Bounds, CacheConfig
from ..ranks.orders import CopyToHost, Fetch, LookUp, Order, Put
from ..ranks.replica.settings import ReplicaConfig
from .silent_executor import SilentExecutor

PAGE_TOKENS = 16
STEPS = 200
"""How many steps are measured while nothing changes."""

OPERATIONS = (1, 32, 256, 2048)
"""How many are in flight, for the lines of the table."""

CHANGES_IN_A_STEP = 32
"""How many operations at most change phase in one step."""

CHANGES = 256
"""How many changes of each kind are measured at least; each step of them is one sample."""

_Lasting = LookUp | Fetch | CopyToHost | Put
"""Orders that last until something is reported of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Steps in which nothing changes, with a number of operations in flight."""

    step_us: float
    """A whole step; the median."""
    operation_us: float
    """What each operation adds to it: the difference to a step with nothing in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPython:
    """Microseconds of Python, with so many operations in flight; medians.

    A change of phase includes the orders that follow from it, and its share of the step in which it
    happens, with up to `CHANGES_IN_A_STEP` others.
    """

    operations: int
    seats: StepCost
    """All of them are prefetches, each with a seat in the ballot."""
    queues: StepCost
    """All of them are backups in their queue."""
    lookup_us: float
    """What each prefetch costs that goes from QUERY to TRANSFER."""
    transfer_us: float
    """What each prefetch costs that goes from TRANSFER to DONE."""
    backup_us: float
    """What each backup costs that goes from ISSUED to DONE."""
    persist_us: float
    """What each persist costs that goes from ISSUED to DONE."""


def measure(operations: int) -> RoundPython:
    """Measure with `operations` in flight, pages of one prompt each; takes a few seconds."""
    empty_us = statistics.median(_quiet_step_us(_Driven(1)) for _ in range(5))
    seats_us: list[float] = []
    queues_us: list[float] = []
    changes_us: dict[type[_Lasting], list[float]] = {
        kind: [] for kind in (LookUp, Fetch, CopyToHost, Put)
    }
    for _ in range(max(1, CHANGES // operations)):
        prefetching, copying = _Driven(operations), _Driven(operations, store=False)
        prefetching.prefetch()
        copying.back_up()
        seats_us.append(_quiet_step_us(prefetching))
        queues_us.append(_quiet_step_us(copying))
        changes_us[LookUp] += prefetching.change_us(LookUp)
        changes_us[Fetch] += prefetching.change_us(Fetch)
        changes_us[CopyToHost] += copying.change_us(CopyToHost)
        # The persists that are measured are those of backups that have ended.
        writing = _Driven(operations)
        writing.back_up()
        writing.change_us(CopyToHost)
        changes_us[Put] += writing.change_us(Put)
    median_us = {kind: statistics.median(each) for kind, each in changes_us.items()}
    return RoundPython(
        operations=operations,
        seats=_step_cost(seats_us, empty_us, operations),
        queues=_step_cost(queues_us, empty_us, operations),
        lookup_us=median_us[LookUp],
        transfer_us=median_us[Fetch],
        backup_us=median_us[CopyToHost],
        persist_us=median_us[Put],
    )


def main() -> None:
    """Print the table, a line for each number of operations in flight."""
    titles = ("in flight", "quiet step", "per op", "lookup", "transfer", "backup", "persist")
    sys.stdout.write("".join(f"{title:>12}" for title in titles) + "\n")
    for operations in OPERATIONS:
        found = measure(operations)
        per_operation = max(found.seats.operation_us, found.queues.operation_us)
        changes = (found.lookup_us, found.transfer_us, found.backup_us, found.persist_us)
        sys.stdout.write(
            f"{operations:>12,}{found.seats.step_us:>12.1f}{per_operation:>12.4f}"
            + "".join(f"{each:>12.1f}" for each in changes)
            + "\n"
        )


def _step_cost(samples_us: list[float], empty_us: float, operations: int) -> StepCost:
    step_us = statistics.median(samples_us)
    return StepCost(step_us=step_us, operation_us=(step_us - empty_us) / operations)


def _end_of(order: _Lasting) -> Progress:
    """Return what says that an order was carried out well, of one page."""
    match order:
        case LookUp():
            return Answered(order.operation, 1)
        case Fetch():
            return Landed(order.operation, 1)
        case _:
            return Ended(order.operation, ok=True)


class _Exchange:
    """A round of one rank: what it gave."""

    def __init__(self, lanes: Vector) -> None:
        self._lanes = lanes

    def wait(self, timeout_s: float) -> Vector:  # noqa: ARG002 - nobody is waited for.
        """See `PendingRound`."""
        return self._lanes


class _Alone:
    """The collective of a world of one rank."""

    rank = 0
    world_size = 1
    transport = "none"

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, lanes: Vector) -> _Exchange:
        """See `Collective`."""
        self.launches += 1
        return _Exchange(lanes)

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:  # noqa: ARG002 - as above.
        """See `Collective`."""
        return [payload]

    def close(self) -> None:
        """See `Collective`."""


class _ToldExecutor(SilentExecutor):
    """Keeps the orders, and reports what it is told to."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.said: list[Progress] = []

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Keep them."""
        self.orders.extend(orders)

    def progress(self) -> list[Progress]:
        """Report what it was told."""
        said, self.said = self.said, []
        return said


class _Driven:
    """A cache with room for `operations` of each kind, at depth 0, so that a step is a whole round."""

    def __init__(self, operations: int, *, store: bool = True) -> None:
        columns = (Column(name="kv", layers=1, heads=8, elements=1),)
        config = CacheConfig(
            model="bench",
            layout=PageLayout(page_tokens=PAGE_TOKENS, columns=columns),
            device_pages=2 * operations,
            host_pages=4 * operations,
            store="memory://bench" if store else None,
            pipeline_depth=0,
            bounds=Bounds(
                prefetches=operations, persists=operations, prefetch_pages=2 * operations
            ),
        )
        replica_config = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"bench")
        self._operations = operations
        self._executor = _ToldExecutor()
        self.cache = Cache(config, _Alone(), self._executor, replica_config)

    def prefetch(self) -> None:
        """Begin as many prefetches as there is room for, each of one page."""
        for number in range(self._operations):
            self.cache.prefetch(f"request {number}", _prompt(number))

    def back_up(self) -> None:
        """Begin as many backups as there is room for, each of one page."""
        for number in range(self._operations):
            name, prompt = f"request {number}", _prompt(number)
            self.cache.load_back(name, [], reserve_tokens=PAGE_TOKENS)
            self.cache.insert(name, prompt)
            self.cache.release(name)

    def change_us(self, kind: type[_Lasting]) -> list[float]:
        """Report on every order of a kind, a few in each step; return by step the time for each."""
        orders = [order for order in self._executor.orders if isinstance(order, kind)]
        samples: list[float] = []
        for batch in _batches(orders):
            self._executor.said = [_end_of(order) for order in batch]
            with _without_collection():
                began = time.perf_counter()
                self.cache.step()
                samples.append((time.perf_counter() - began) / len(batch) * 1e6)
        return samples


def _quiet_step_us(driven: _Driven) -> float:
    driven.cache.step()
    samples: list[float] = []
    with _without_collection():
        for _ in range(STEPS):
            began = time.perf_counter()
            driven.cache.step()
            samples.append(time.perf_counter() - began)
    return statistics.median(samples) * 1e6


@contextmanager
def _without_collection() -> Generator[None]:
    """Keep the collector from running while something short is measured, as `timeit` does."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _batches(orders: Iterable[_Lasting]) -> Iterator[list[_Lasting]]:
    rest = iter(orders)
    while batch := list(islice(rest, CHANGES_IN_A_STEP)):
        yield batch


def _prompt(number: int) -> list[int]:
    return [number] * PAGE_TOKENS


if __name__ == "__main__":
    main()
