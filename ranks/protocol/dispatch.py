"""What a decider tells the workers that hold the ranks' pages. Plain data.

One dispatch in each step of the engine, the same for every worker: what the replica's effects say to
ballot and executor, in their order, and last the round to vote in. It leaves the process as bytes
(rule R11), whatever channel an engine brings it by.
"""

from typing import Final, TypeAlias

from ...coordinator.codec import Codec, Record
from ...coordinator.expectations import Expectation
from ...coordinator.proposal import Change
from .config import HostCacheConfig
from .orders import Order
from .replica_config import ReplicaConfig


class Expect(Record, frozen=True):
    """For the ballot: what it is to expect from now on."""

    expectations: tuple[Expectation, ...]


class CarryOut(Record, frozen=True):
    """For the executor: what it is to do."""

    orders: tuple[Order, ...]


class Prepare(Record, frozen=True):
    """For the executor: a proposal is staged, and prepared in the background."""

    change: Change
    store: str


class GiveUp(Record, frozen=True):
    """For the executor: nothing comes of the proposal that is staged."""


class Rest(Record, frozen=True):
    """The engine computes nothing in this step: wait so long, at most, for progress to vote for."""

    at_most_s: float


class Log(Record, frozen=True):
    """For the worker's process: log from this level on."""

    level: str


class Vote(Record, frozen=True):
    """Vote in this round: the header that the ballots of all ranks have alike."""

    epoch: int
    round: int
    state_digest: int
    layout_digest: int


Told: TypeAlias = Expect | CarryOut | Prepare | GiveUp | Log | Rest | Vote


class Dispatch(Record, frozen=True):
    """All that the workers are told in one step."""

    number: int
    """Which one it is, from 1 on: a worker that misses one knows it."""
    told: tuple[Told, ...]


class Opened(Record, frozen=True):
    """What a worker tells the decider once, when its memory and its store are ready."""

    rank: int
    world_size: int
    config: HostCacheConfig
    """The settings that all ranks have agreed on."""
    replica: ReplicaConfig
    serving_address: str
    """Where readers of other groups find this rank's pages; empty if they cannot."""


DISPATCHES: Final[Codec[Dispatch]] = Codec(Dispatch)
OPENINGS: Final[Codec[Opened]] = Codec(Opened)
