"""Messages from the scheduler's process to the workers in one-scheduler mode. Plain data.

The scheduler sends one dispatch per engine step, equal for every worker. A dispatch has the replica's
effects on ballot and executor in order, followed by the request to vote in the step's round. The
dispatch is encoded as bytes (rule R11), so that any channel of the engine can carry it.
"""

from typing import Final, TypeAlias

from ...coordinator.codec import Codec, Record
from ...coordinator.expectations import Expectation
from ...coordinator.proposal import Change
from .config import HostCacheConfig
from .orders import Order
from .replica_config import ReplicaConfig


class Expect(Record, frozen=True):
    """Message for a worker's ballot: the operations on which to report progress from now on."""

    expectations: tuple[Expectation, ...]


class CarryOut(Record, frozen=True):
    """Message for a worker's executor: orders to execute."""

    orders: tuple[Order, ...]


class Prepare(Record, frozen=True):
    """Message for a worker's executor: stage a proposal and prepare it in the background."""

    change: Change
    store: str


class GiveUp(Record, frozen=True):
    """Message for a worker's executor: discard the staged proposal."""


class Rest(Record, frozen=True):
    """Message for a step without a forward pass: wait up to `at_most_s` for progress, then vote."""

    at_most_s: float


class Log(Record, frozen=True):
    """Message for a worker's process: set the log level."""

    level: str


class Vote(Record, frozen=True):
    """Message that asks a worker to vote in a round, with the header values that all ballots share."""

    epoch: int
    round: int
    state_digest: int
    layout_digest: int


WorkerMessage: TypeAlias = Expect | CarryOut | Prepare | GiveUp | Log | Rest | Vote


class Dispatch(Record, frozen=True):
    """All messages for the workers in one engine step."""

    number: int
    """Sequence number from 1 on, so that a worker detects a lost dispatch."""
    messages: tuple[WorkerMessage, ...]


class Opened(Record, frozen=True):
    """Message of each worker to the scheduler's process, sent when its memory and store are ready."""

    rank: int
    world_size: int
    config: HostCacheConfig
    """The settings that all ranks have agreed on."""
    replica: ReplicaConfig
    serving_address: str
    """The address at which other groups read this rank's pages; empty if the rank does not serve
    pages."""


DISPATCHES: Final[Codec[Dispatch]] = Codec(Dispatch)
OPENINGS: Final[Codec[Opened]] = Codec(Opened)
