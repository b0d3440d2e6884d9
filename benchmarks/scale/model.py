"""What agreement costs by ranks, hosts, seats, operations and pages: a model of its own code.

Pure functions of a `Deployment`, of `Costs` that `fit` measures on one machine, and of a
`Network`, which one machine cannot measure and which is therefore assumed. Each term says which code
it stands for. A blocking step is modelled; a pipelined one hides all of it but the Python.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from ...coordinator.collective import Transport
from ...coordinator.lanes import BallotShape
from ..gloo_rings import Sent, doubled, gathered, is_gathered, reduced, ring_steps

WORD = 8
"""Bytes of a lane."""

DOUBLING: Final = "doubling"
"""No transport: an exchange that doubles its reach in every step (`exchange_rank.Doubling`), which
shows what a ring costs."""

Way = Transport | Literal["doubling"]
"""How a round is exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A group, and what is in flight in it."""

    ranks: int
    hosts: int = 1
    """The hosts have as many ranks each; the last may have fewer."""
    seats: int = 32
    """Prefetches that the ballot has room for; three lanes each."""
    operations: int = 32
    """In flight: prefetches with a seat or waiting for one, copies and writes."""
    pages: int = 16
    """The pages of each operation."""
    changes: int = 0
    """Operations of which something is new in the round that is looked at."""

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on the fullest host."""
        return -(-self.ranks // self.hosts)

    @property
    def lanes(self) -> int:
        """The length of the vector: the header and queues, and three lanes for each seat."""
        return BallotShape(world_size=self.ranks, seats=self.seats).length

    @property
    def vector_bytes(self) -> int:
        """The bytes that one rank has to say in a round, whatever is in flight."""
        return WORD * self.lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Microseconds, and bytes, of the machine on which they were fitted.

    A `row` is one rank's vector where it is read or folded, a `lane` one number of one row. What is 0
    was not fitted, or does not show in what was measured.
    """

    note_us: float = 0.0
    """`Ballot.note`, for each report of the executor."""
    fill_us: float = 0.0
    fill_lane_us: float = 0.0
    """`Ballot.fill` copies the vector and writes its header."""
    write_us: float = 0.0
    write_lane_us: float = 0.0
    """`Cells.write` copies and checksums a vector, and wakes who sleeps."""
    read_us: float = 0.0
    read_row_us: float = 0.0
    read_lane_us: float = 0.0
    """`Cells.read` compares the numbers of the rows, copies them and checksums each."""
    fold_us: float = 0.0
    fold_row_us: float = 0.0
    fold_lane_us: float = 0.0
    """`fold`: the minimum over rows."""
    wake_us: float = 0.0
    """The time from a write to the return of whoever slept on it; also what a sleep costs both."""
    gloo_us: float = 0.0
    """A collective of torch and gloo, for the rank that waits for it, before any message."""
    gloo_lane_us: float = 0.0
    """What torch adds for each lane of each row: it gathers into memory of its own, and copies."""
    gloo_step_us: float = 0.0
    """One step of the ring over loopback: two messages there, and their wake-ups."""
    gloo_byte_us: float = 0.0
    """What a step adds for each byte that it moves over loopback."""
    gloo_work_us: float = 0.0
    gloo_message_work_us: float = 0.0
    gloo_byte_work_us: float = 0.0
    """What all threads of a rank compute: for a collective, a message sent, a byte sent."""
    courier_us: float = 0.0
    courier_work_us: float = 0.0
    """What a courier adds beyond the parts above, in time and in what is computed: two threads of one
    process take turns."""
    verdict_us: float = 0.0
    verdict_lane_us: float = 0.0
    verdict_change_us: float = 0.0
    """`disagreements` and `Verdicts.read`: compares with the round before, reads what differs."""
    apply_us: float = 0.0
    apply_change_us: float = 0.0
    apply_page_us: float = 0.0
    """`Replica.apply`: nothing new; a change of phase; each page of an operation that changes."""
    sightings_bytes: float = 0.0
    """What a ballot keeps of an operation."""
    operation_bytes: float = 0.0
    operation_page_bytes: float = 0.0
    """What a replica keeps of an operation, and of each of its pages: tokens, keys, page numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Says what lies between two hosts, in the place of the loopback that `Costs` were fitted on."""

    latency_us: float = 25.0
    """One way, beyond what the software does, which is fitted."""
    bytes_per_us: float = 1250.0
    """1,250 are 10 Gbit/s."""


LOOPBACK = Network(latency_us=0.0, bytes_per_us=float("inf"))
"""One machine: nothing beyond what is fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counts what one round moves, of all ranks together."""

    cells_written: int = 0
    rows_read: int = 0
    """Copies of a rank's cell, or of a host's."""
    bytes_written: int = 0
    """Into cells, without their headers."""
    bytes_read: int = 0
    between: Sent = field(default_factory=Sent)
    """What gloo sends: between hosts, or between ranks where it carries all of it."""


def traffic(deployment: Deployment, transport: Way) -> Traffic:
    """Return what one round moves over a transport. Exact: a test counts it."""
    ranks, hosts, size = deployment.ranks, deployment.hosts, deployment.vector_bytes
    match transport:
        case Transport.SHM:
            # Every rank writes a cell and reads those of all.
            return Traffic(
                cells_written=ranks,
                rows_read=ranks * ranks,
                bytes_written=ranks * size,
                bytes_read=ranks * ranks * size,
            )
        case Transport.HIERARCHICAL:
            # Couriers read the cells of their ranks and write a result, which every rank reads.
            return Traffic(
                cells_written=ranks + hosts,
                rows_read=2 * ranks,
                bytes_written=(ranks + hosts) * size,
                bytes_read=2 * ranks * size,
                between=_between(hosts, size + WORD),
            )
        case "doubling":
            return Traffic(between=doubled(ranks, size))
        case _:
            return Traffic(between=_between(ranks, size))


def _between(members: int, size: int) -> Sent:
    return gathered(members, size) if is_gathered(size) else reduced(members, size)


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a step, of a rank that waits for nobody but through the transport."""

    name: str
    us: float


def critical_path(
    deployment: Deployment, transport: Way, costs: Costs, network: Network = LOOPBACK
) -> tuple[Term, ...]:
    """Return the parts of one blocking step in order, where every rank has a core."""
    lanes, changes = deployment.lanes, deployment.changes
    pages = changes * deployment.pages
    filling = changes * costs.note_us + costs.fill_us + costs.fill_lane_us * lanes
    reading = costs.verdict_us + costs.verdict_lane_us * lanes + costs.verdict_change_us * changes
    applying = costs.apply_us + costs.apply_change_us * changes + costs.apply_page_us * pages
    return (
        Term("fill the ballot", filling),
        *exchange_path(deployment, transport, costs, network),
        Term("read the verdict", reading),
        Term("apply it", applying),
    )


def exchange_path(
    deployment: Deployment, transport: Way, costs: Costs, network: Network = LOOPBACK
) -> tuple[Term, ...]:
    """Return the transport's parts of a step in order, where every rank has a core."""
    ranks, hosts, lanes = deployment.ranks, deployment.hosts, deployment.lanes
    here = deployment.ranks_per_host
    writing = costs.write_us + costs.write_lane_us * lanes
    match transport:
        case Transport.SHM:
            return (
                Term("write the cell", writing),
                Term("wake up", costs.wake_us if ranks > 1 else 0.0),
                Term("read the ranks' cells", read_us(ranks, lanes, costs)),
                Term("fold the ranks", fold_us(ranks, lanes, costs)),
            )
        case Transport.HIERARCHICAL:
            # The courier is a thread of its own, and is woken even where its host has one rank.
            return (
                Term("write the cell", writing),
                Term("wake up", costs.wake_us),
                Term("read the ranks' cells", read_us(here, lanes, costs)),
                Term("fold the ranks", fold_us(here, lanes, costs)),
                Term("the courier's turns", costs.courier_us),
                *_gloo_path(hosts, lanes + 1, costs, network),
                Term("write the result", writing),
                Term("wake up again", costs.wake_us),
                Term("read the result", read_us(1, lanes, costs) + fold_us(1, lanes, costs)),
            )
        case "doubling":
            return _doubling_path(ranks, lanes, costs, network)
        case _:
            return _gloo_path(ranks, lanes, costs, network)


def _gloo_path(members: int, lanes: int, costs: Costs, network: Network) -> tuple[Term, ...]:
    """`TorchCollective`: a ring, in which nobody has anything before it was around.

    all_gather: `members` - 1 steps, each moves one vector on; every member then folds all of them.
    all_reduce: twice as many steps, each moves one vector's share on.
    """
    size = WORD * lanes
    steps, rows = ring_steps(members, size), 1
    moved = 2 * (members - 1) * size / members
    if is_gathered(size):
        moved, rows = (members - 1) * size, members
    return (
        Term("enter gloo", costs.gloo_us + costs.gloo_lane_us * rows * lanes),
        Term("gloo's steps", steps * (costs.gloo_step_us + network.latency_us)),
        Term("gloo's bytes", moved * (costs.gloo_byte_us + 1.0 / network.bytes_per_us)),
        Term("fold the hosts", fold_us(rows, lanes, costs)),
    )


def _doubling_path(members: int, lanes: int, costs: Costs, network: Network) -> tuple[Term, ...]:
    """A step for each bit of `members`; each moves one whole vector, in one message."""
    steps = (members - 1).bit_length()
    byte_us = costs.gloo_byte_us + 1.0 / network.bytes_per_us
    return (
        Term("enter gloo", 2 * steps * costs.gloo_us),
        Term("gloo's steps", steps * (costs.gloo_step_us + network.latency_us)),
        Term("gloo's bytes", steps * WORD * lanes * byte_us),
        Term("fold the hosts", steps * fold_us(2, lanes, costs)),
    )


def gathered_bytes_max(members: int, costs: Costs, network: Network) -> float:
    """Return the vector up to which gathering takes less time than reducing, as the model has it.

    Gathering takes half the steps, and moves and folds more: which is the less depends on the size of
    one vector, and hardly on the number of members.
    """
    step_us = costs.gloo_step_us + network.latency_us
    byte_us = (costs.gloo_byte_us + 1.0 / network.bytes_per_us) * (1.0 - 2.0 / members)
    return step_us / (byte_us + (costs.gloo_lane_us + costs.fold_lane_us) / WORD)


def total_us(terms: tuple[Term, ...]) -> float:
    """Return the sum of terms."""
    return sum(term.us for term in terms)


def exchange_work_us(deployment: Deployment, transport: Way, costs: Costs) -> float:
    """Return what the processors of all ranks do for one exchange.

    On fewer cores than ranks a round takes at least its share of this: that is how the model is held
    against processes that share two cores, where no rank has one of its own.
    """
    ranks, hosts, lanes = deployment.ranks, deployment.hosts, deployment.lanes
    writing = costs.write_us + costs.write_lane_us * lanes
    moved = traffic(deployment, transport)
    match transport:
        case Transport.SHM:
            reading = read_us(ranks, lanes, costs) + fold_us(ranks, lanes, costs)
            waking = costs.wake_us if ranks > 1 else 0.0
            return ranks * (writing + waking + reading)
        case Transport.HIERARCHICAL:
            here = deployment.ranks_per_host
            courier = writing + costs.wake_us + costs.courier_work_us
            courier += read_us(here, lanes, costs) + fold_us(here, lanes, costs)
            member = writing + costs.wake_us
            member += read_us(1, lanes, costs) + fold_us(1, lanes, costs)
            between = _gloo_work_us(hosts, lanes + 1, moved.between, costs)
            return hosts * courier + ranks * member + between
        case "doubling":
            sent, steps = moved.between, (ranks - 1).bit_length()
            each = steps * (2 * costs.gloo_us + fold_us(2, lanes, costs))
            return (
                ranks * each
                + sent.messages * costs.gloo_message_work_us
                + sent.payload_bytes * costs.gloo_byte_work_us
            )
        case _:
            return _gloo_work_us(ranks, lanes, moved.between, costs)


def _gloo_work_us(members: int, lanes: int, sent: Sent, costs: Costs) -> float:
    rows = members if is_gathered(WORD * lanes) else 1
    each = costs.gloo_work_us + costs.gloo_lane_us * rows * lanes + fold_us(rows, lanes, costs)
    return (
        members * each
        + sent.messages * costs.gloo_message_work_us
        + sent.payload_bytes * costs.gloo_byte_work_us
    )


def shared_us(deployment: Deployment, transport: Way, costs: Costs, cores: int) -> float:
    """Return how long an exchange takes where all ranks of all hosts share the cores of one machine."""
    alone_us = total_us(exchange_path(deployment, transport, costs))
    return max(alone_us, exchange_work_us(deployment, transport, costs) / cores)


def read_us(rows: int, lanes: int, costs: Costs) -> float:
    """Return what `Cells.read` of so many writers takes."""
    return costs.read_us + rows * (costs.read_row_us + costs.read_lane_us * lanes)


def fold_us(rows: int, lanes: int, costs: Costs) -> float:
    """Return what `fold` of so many vectors takes."""
    return costs.fold_us + rows * (costs.fold_row_us + costs.fold_lane_us * lanes)
