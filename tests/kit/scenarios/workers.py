"""Runs scenarios with the replica in this process, and with one worker process for each rank.

A worker process has the rank's ballot and executor. The processes exchange only bytes
(`lockstep.coordinator.codec`). This process sends expectations and orders to a worker. The worker
returns what it has decoded, and this process compares it with the originals. On request a worker sends
its ballot's vector. Workers receive no verdicts.
"""

import multiprocessing
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from lockstep.coordinator.codec import Codec
from lockstep.coordinator.collective import Vector
from lockstep.coordinator.expectations import Expectation
from lockstep.coordinator.lanes import BallotShape, LaneLayout
from lockstep.coordinator.prefetch_slots import COLUMNS, PrefetchSlotTable
from lockstep.ranks.protocol.orders import Order
from tests.kit.scenarios.language import Scenario
from tests.kit.scenarios.ranks import InProcessRank
from tests.kit.scenarios.run import run

PATIENCE_S = 60.0
"""Seconds to wait for an answer. Only a hung worker takes longer."""

Followed = tuple[tuple[Expectation, ...], tuple[Order, ...]]
Plain = tuple[Any, ...]
_NOTHING: Followed = (), ()
_QUESTIONS: Codec[tuple[str, Followed, Plain]] = Codec(tuple[str, Followed, Plain])
_ANSWERS: Codec[tuple[Followed, Plain] | str] = Codec(tuple[Followed, Plain] | str)
"""Codec of a worker's answers. An answer of type `str` is the traceback of an error."""

_processes = multiprocessing.get_context("spawn")


class WorkerRank:
    """A scenario's rank in another process, with the interface of `ranks.Rank`."""

    def __init__(self, connection: Connection, rank: int, shape: BallotShape) -> None:
        self._connection = connection
        self._rank = rank
        self._ask("begin", rank, shape.world_size, shape.prefetch_slots)

    def follow(self, expectations: Sequence[Expectation], orders: Sequence[Order]) -> None:
        followed = tuple(expectations), tuple(orders)
        assert self._ask("follow", followed=followed) == (followed, ())

    def hear(self, report: str) -> None:
        self._ask("hear", report)

    def vote(self, layout: LaneLayout) -> Vector:
        """Return the rank's ballot as a vector; check that it comes from the right rank and round."""
        prefetch_slots = layout.prefetch_slots
        frozen = (
            layout.epoch,
            layout.round,
            layout.state_digest,
            prefetch_slots.rows.tobytes(),
            prefetch_slots.digest,
        )
        _, (rank, number, vector) = self._ask("vote", *frozen)
        assert (rank, number) == (self._rank, layout.round)
        return np.frombuffer(vector, dtype=np.int64)

    def read(self, number: int) -> bytes:
        _, (content,) = self._ask("read", number)
        return cast("bytes", content)

    def _ask(self, verb: str, *plain: Any, followed: Followed = _NOTHING) -> tuple[Followed, Any]:
        self._connection.send_bytes(_QUESTIONS.encode((verb, followed, plain)))
        assert self._connection.poll(PATIENCE_S), f"rank {self._rank} does not answer"
        answer = _ANSWERS.decode(self._connection.recv_bytes())
        assert not isinstance(answer, str), answer
        return answer


class Workers:
    """One worker process per rank, used for one scenario after the other."""

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
        """Run a scenario with the replica in this process and the ranks in the workers."""
        return run(
            scenario,
            lambda rank, shape: WorkerRank(self._connections[rank], rank, shape),
            one_replica=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections, so that the worker processes exit, and wait for their exit."""
        for connection, process in zip(self._connections, self._running, strict=True):
            connection.close()
            process.join(PATIENCE_S)
            process.close()


def work(connection: Connection) -> None:
    """Act as a rank of one scenario after the other until the connection is closed."""
    worker = _Worker()
    answer: tuple[Followed, Plain] | str
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            verb, followed, plain = _QUESTIONS.decode(message)
            answer = followed, worker.answer(verb, followed, *plain)
        except Exception:  # noqa: BLE001 - the test is to fail, and not to wait.
            answer = traceback.format_exc()
        connection.send_bytes(_ANSWERS.encode(answer))


class _Worker:
    """State of a worker process during a scenario."""

    _scenario_rank: InProcessRank
    _rank: int

    def answer(self, verb: str, followed: Followed, *parts: Any) -> Plain:
        """Execute the request `verb` of the replica's process; return the answer.

        `followed` are the expectations and orders of a `follow`; `parts` are all other arguments.
        """
        match verb:
            case "begin":
                self._rank, world_size, prefetch_slots = parts
                shape = BallotShape(world_size=world_size, prefetch_slots=prefetch_slots)
                self._scenario_rank = InProcessRank(self._rank, shape)
            case "follow":
                self._scenario_rank.follow(*followed)
            case "hear":
                self._scenario_rank.hear(*parts)
            case "read":
                return (self._scenario_rank.read(*parts),)
            case _:
                epoch, number, state_digest, cells, digest = parts
                rows = np.frombuffer(cells, dtype=np.int64).reshape(-1, COLUMNS)
                prefetch_slots = PrefetchSlotTable(rows, digest)
                layout = LaneLayout(
                    epoch=epoch,
                    round=number,
                    state_digest=state_digest,
                    prefetch_slots=prefetch_slots,
                )
                return self._rank, number, self._scenario_rank.vote(layout).tobytes()
        return ()
