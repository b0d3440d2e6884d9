"""What gloo's collectives send: both are rings, and a vector goes around in pieces.

Counted from gloo's sources (`gloo/allgather.cc`, `gloo/allreduce.cc`; torch asks for neither of its
other algorithms), and from what real processes write, headers included: `tests/distributed/` holds
the one against the other.
"""

from dataclasses import dataclass

from ..coordinator.collectives.torch_gloo import GATHERED_BYTES_MAX

HEADERS_BYTES = 144
"""Beside its payload a message has a header, and one each to say that it can be sent and received."""

_ELEMENT = 8
"""Bytes of a lane, which gloo does not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Counts what all members of a group send in one collective."""

    messages: int = 0
    payload_bytes: int = 0

    @property
    def written_bytes(self) -> int:
        """The bytes that the kernel sees, gloo's headers included."""
        return self.payload_bytes + HEADERS_BYTES * self.messages


def is_gathered(size: int) -> bool:
    """Say whether vectors of `size` bytes are gathered and folded everywhere, or reduced on the way."""
    return size <= GATHERED_BYTES_MAX


def ring_steps(members: int, size: int) -> int:
    """Return how many steps follow one upon the other: once around the ring, or twice."""
    return (members - 1) * (1 if is_gathered(size) else 2)


def gathered(members: int, size: int) -> Sent:
    """Return what all_gather sends: in each step every member passes on one vector, in two halves."""
    passed_on = members * (members - 1)
    return Sent(messages=2 * passed_on, payload_bytes=passed_on * size)


def doubled(members: int, size: int) -> Sent:
    """Return what pairs swap where the reach doubles in every step: a vector each, in one message."""
    swaps = members * (members - 1).bit_length()
    return Sent(messages=swaps, payload_bytes=swaps * size)


def reduced(members: int, size: int) -> Sent:
    """Return what all_reduce sends.

    The vector is cut into two segments for each member, but into none of less than an element. On
    the first way around every member passes on all segments but its own two, on the second the same.
    """
    segment = -(-size // (2 * members))
    segment = -(-segment // _ELEMENT) * _ELEMENT
    segments = -(-size // segment)
    return Sent(messages=2 * (members - 1) * segments, payload_bytes=2 * (members - 1) * size)
