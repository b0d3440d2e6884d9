"""Ranks of scenarios that are processes: the replica stands in one, ballots and executors in others.

What passes between them is bytes (`lockstep.ranks.protocol.wire`) and nothing else. The replica's
process sends what is to be expected and done; a rank answers with what it was told, so that it can be
compared, and with its vector when it is to vote. Verdicts never reach it.
"""

import multiprocessing
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np

from lockstep.coordinator.collective import Vector
from lockstep.coordinator.expectations import Expectation
from lockstep.coordinator.lanes import BallotShape, LaneLayout
from lockstep.coordinator.seats import COLUMNS, SeatTable
from lockstep.ranks.protocol.orders import Order
from lockstep.ranks.protocol.wire import decode, encode
from tests.kit.scenarios.language import Scenario
from tests.kit.scenarios.ranks import ToldRank
from tests.kit.scenarios.run import run

PATIENCE_S = 60.0
"""What only a worker takes that does not answer."""

_processes = multiprocessing.get_context("spawn")


class WorkerRank:
    """A rank in another process; see `ranks.Rank`."""

    def __init__(self, connection: Connection, rank: int, shape: BallotShape) -> None:
        self._connection = connection
        self._rank = rank
        self._ask("begin", rank, shape.world_size, shape.seats)

    def follow(self, expectations: Sequence[Expectation], orders: Sequence[Order]) -> None:
        """See `Rank`."""
        told = tuple(expectations), tuple(orders)
        assert self._ask("follow", *told) == told

    def hear(self, report: str) -> None:
        """See `Rank`."""
        self._ask("hear", report)

    def vote(self, layout: LaneLayout) -> Vector:
        """See `Rank`. A vector counts for the rank and the round that it comes with."""
        seats = layout.seats
        frozen = layout.epoch, layout.round, layout.state_digest, seats.rows.tobytes(), seats.digest
        rank, number, vector = self._ask("vote", *frozen)
        assert (rank, number) == (self._rank, layout.round)
        return np.frombuffer(vector, dtype=np.int64)

    def read(self, number: int) -> bytes:
        """See `Rank`."""
        content: bytes = self._ask("read", number)
        return content

    def _ask(self, *message: object) -> Any:
        self._connection.send_bytes(encode(message))
        assert self._connection.poll(PATIENCE_S), f"rank {self._rank} does not answer"
        went_well, answer = decode(self._connection.recv_bytes())
        assert went_well, answer
        return answer


class Workers:
    """Processes for the ranks of scenarios, one scenario after the other."""

    def __init__(self, count: int) -> None:
        self._connections: list[Connection] = []
        self._running: list[Any] = []
        for _ in range(count):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._running.append(process)

    def run(self, scenario: Scenario) -> str:
        """Run a scenario whose replica is here and whose ranks are not."""
        return run(
            scenario,
            lambda rank, shape: WorkerRank(self._connections[rank], rank, shape),
            one_replica=True,
        )

    def __enter__(self) -> Self:
        """Return these workers."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes, which do so once nobody can ask them any more."""
        for connection, process in zip(self._connections, self._running, strict=True):
            connection.close()
            process.join(PATIENCE_S)
            process.close()


def work(connection: Connection) -> None:
    """Be a rank of one scenario after the other, until the other end is closed."""
    worker = _Worker()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = True, worker.answer(*decode(message))
        except Exception:  # noqa: BLE001 - the test is to fail, and not to wait.
            answer = False, traceback.format_exc()
        connection.send_bytes(encode(answer))


class _Worker:
    """What a worker has of the scenario that runs."""

    _told: ToldRank
    _rank: int

    def answer(self, verb: str, *parts: Any) -> object:
        """Do what the replica's process says."""
        match verb:
            case "begin":
                self._rank, world_size, seats = parts
                shape = BallotShape(world_size=world_size, seats=seats)
                self._told = ToldRank(self._rank, shape)
            case "follow":
                self._told.follow(*parts)
                return parts
            case "hear":
                self._told.hear(*parts)
            case "read":
                return self._told.read(*parts)
            case _:
                epoch, number, state_digest, cells, digest = parts
                rows = np.frombuffer(cells, dtype=np.int64).reshape(-1, COLUMNS)
                seats = SeatTable(rows, digest)
                layout = LaneLayout(
                    epoch=epoch, round=number, state_digest=state_digest, seats=seats
                )
                return self._rank, number, self._told.vote(layout).tobytes()
        return None
