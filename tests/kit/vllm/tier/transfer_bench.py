"""The memory of an engine, and jobs between it and a store, as vLLM's tier has them, without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.integrations.blocking_store import BlockingStore
from lockstep.integrations.vllm.tier.names import ChunkNames
from lockstep.integrations.vllm.tier.transfers import Ended, Limits, Rows, Transfers
from tests.kit.waiting import wait_for

ROW = 4096
ROWS = 8
NAMES = ChunkNames("ab" * 32, "one-copy")


def keys(*numbers: int) -> list[bytes]:
    return [bytes([each]) * 32 + bytes(4) for each in numbers]


@dataclass
class Bench:
    """The memory of an engine, and its jobs."""

    store: BlockingStore
    in_flight_rows: int = ROWS
    limit_s: float = 60.0
    rows: Rows = field(default_factory=lambda: np.zeros((ROWS, ROW), np.uint8))

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            row[:] = number + 1
        limits = Limits(
            read_s=self.limit_s, write_s=self.limit_s, in_flight_bytes=self.in_flight_rows * ROW
        )
        self.transfers = Transfers(self.rows.data, limits)
        self.transfers.begin_with(self.store, NAMES)

    def write(self, number: int, what: Sequence[bytes], rows: Sequence[int]) -> None:
        self.transfers.begin(number, what, rows, reads=False)

    def read(self, number: int, what: Sequence[bytes], rows: Sequence[int]) -> None:
        self.transfers.begin(number, what, rows, reads=True)

    def ended(self) -> list[Ended]:
        self.transfers.drain()
        return self.transfers.ended()

    def first(self, count: int) -> list[Ended]:
        """The first jobs that end, of which one may hang."""
        over: list[Ended] = []

        def are_over() -> bool:
            over.extend(self.transfers.ended())
            return len(over) >= count

        wait_for(are_over)
        return over

    def written(self, what: Sequence[bytes], rows: Sequence[int]) -> list[Ended]:
        self.write(0, what, rows)
        return self.ended()


def values(bench: Bench) -> list[int]:
    """What is in each row; -1 where it is not one value throughout."""
    return [int(row[0]) if (row == row[0]).all() else -1 for row in bench.rows]
