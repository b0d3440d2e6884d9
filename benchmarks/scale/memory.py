"""What agreement keeps on a rank, beside the time it takes (`model`): memory and sockets."""

from dataclasses import dataclass

from ...coordinator.collective import Transport
from ...coordinator.collectives.cells import Cells
from ...coordinator.seats import COLUMNS
from ..gloo_rings import is_gathered
from .model import WORD, Costs, Deployment, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that agreement takes, of the rank that has most: the first of its host."""

    segment: int
    """The whole memory of the cells, which the ranks of a host share."""
    vectors: int
    """The vectors of ballot, last verdict and round in flight, and the seats' table twice."""
    rows: int
    """What is read of the cells at once, to be folded."""
    gloo: int
    """The rows that are gathered, and torch's flat copy of them; or the vector that is reduced."""
    ballot: int
    """What was seen of the operations in flight."""
    replica: int
    """The operations in flight themselves."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.segment + self.vectors + self.rows + self.gloo + self.ballot + self.replica


def memory(deployment: Deployment, transport: Way, costs: Costs) -> RankMemory:
    """Return the memory that agreement takes on one rank."""
    size, lanes = deployment.vector_bytes, deployment.lanes
    segment = rows = gloo = 0
    match transport:
        case Transport.SHM:
            segment, rows = Cells.size(deployment.ranks, lanes), deployment.ranks * size
        case Transport.HIERARCHICAL:
            segment = Cells.size(deployment.ranks_per_host + 1, lanes)
            rows = deployment.ranks_per_host * size
            gloo = _gloo_bytes(deployment.hosts, size + WORD)
        case _:
            gloo = _gloo_bytes(deployment.ranks, size)
    return RankMemory(
        segment=segment,
        vectors=4 * size + 2 * WORD * COLUMNS * deployment.seats,
        rows=rows,
        gloo=gloo,
        ballot=round(costs.sightings_bytes * deployment.operations),
        replica=round(
            deployment.operations
            * (costs.operation_bytes + costs.operation_page_bytes * deployment.pages)
        ),
    )


def _gloo_bytes(members: int, size: int) -> int:
    return 2 * members * size if is_gathered(size) else 2 * size


def sockets(deployment: Deployment, transport: Way) -> int:
    """Return how many sockets the first rank of a host keeps for its rounds.

    Gloo connects every member with every other, and each listens. The group of all ranks is there
    with any transport: over it they meet, and explain a divergence.
    """
    couriers = deployment.hosts if transport is Transport.HIERARCHICAL else 0
    return deployment.ranks + couriers
