"""Messages from the scheduler's process to the workers in one-scheduler mode. Plain data.

The scheduler sends one dispatch per engine step, equal for every worker: the replica's effects for
ballot and executor in order, then the round to vote in. The message is encoded as bytes (rule R11) for
any channel of the engine.
"""

from typing import Final, TypeAlias

from ...coordinator.codec import Codec, Record
from ...coordinator.expectations import Expectation
from ...coordinator.proposal import Change
from .config import HostCacheConfig
from .orders import Order
from .replica_config import ReplicaConfig


class Expect(Record, frozen=True):
    """For the ballot: facts to expect from now on."""

    expectations: tuple[Expectation, ...]


class CarryOut(Record, frozen=True):
    """For the executor: orders to execute."""

    orders: tuple[Order, ...]


class Prepare(Record, frozen=True):
    """For the executor: stage a proposal and prepare it in the background."""

    change: Change
    store: str


class GiveUp(Record, frozen=True):
    """For the executor: discard the staged proposal."""


class Rest(Record, frozen=True):
    """No forward pass in this step: wait up to `at_most_s` seconds for progress before voting."""

    at_most_s: float


class Log(Record, frozen=True):
    """For the worker's process: set the log level."""

    level: str


class Vote(Record, frozen=True):
    """Vote in this round. The fields are the header that the ballots of all ranks share."""

    epoch: int
    round: int
    state_digest: int
    layout_digest: int


Told: TypeAlias = Expect | CarryOut | Prepare | GiveUp | Log | Rest | Vote


class Dispatch(Record, frozen=True):
    """All messages to the workers in one step."""

    number: int
    """Sequence number from 1 on, so that a worker detects a lost dispatch."""
    told: tuple[Told, ...]


class Opened(Record, frozen=True):
    """Sent once by each worker to the scheduler, when its memory and its store are ready."""

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
