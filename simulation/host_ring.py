"""The exchanges between hosts as gloo carries them out: rings, message by message.

Each host keeps and passes on what gloo would, so that the result comes out of the exchange itself and
not out of a fold beside it, and so that messages can be counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..coordinator.collective import Vector
from ..coordinator.fold import fold


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What every host has at the end of an exchange, and what was sent for it."""

    folded: list[Vector]
    """The folded vector that each host has, by host."""
    steps: int
    """How many messages must follow one upon the other."""
    messages: int
    payload_bytes: int


def gather(given: Sequence[Vector]) -> Exchanged:
    """Send all vectors around the ring, each in two halves; then every host folds what it has."""
    hosts = len(given)
    held: list[dict[int, Vector]] = [{host: vector} for host, vector in enumerate(given)]
    messages = payload_bytes = 0
    for step in range(hosts - 1):
        passed = [(host - step) % hosts for host in range(hosts)]
        for host, owner in enumerate(passed):
            vector = held[host][owner]
            held[(host + 1) % hosts][owner] = vector
            messages += 2
            payload_bytes += vector.nbytes
    folded = [fold(list(rows.values())) for rows in held]
    return Exchanged(folded, hosts - 1, messages, payload_bytes)


def reduce(given: Sequence[Vector]) -> Exchanged:
    """Send each host's share of the vector around the ring to collect minima, and then all shares.

    A share is two segments; what lies beyond the vector's end is not sent.
    """
    hosts, lanes = len(given), len(given[0])
    segment = max(1, -(-lanes // (2 * hosts)))
    held = [vector.copy() for vector in given]
    messages = payload_bytes = 0
    for reducing in (True, False):
        for step in range(hosts - 1):
            # Everybody sends before anybody receives, so what is sent is what was there before.
            sending: list[tuple[int, slice, Vector]] = []
            for host in range(hosts):
                share = (host + (1 if reducing else 0) + step) % hosts
                for half in (2 * share, 2 * share + 1):
                    part = slice(half * segment, min((half + 1) * segment, lanes))
                    if part.start < part.stop:
                        sending.append(((host - 1) % hosts, part, held[host][part].copy()))
            for receiver, part, sent in sending:
                mine = held[receiver][part]
                if reducing:
                    np.minimum(mine, sent, out=mine)
                else:
                    mine[:] = sent
                messages += 1
                payload_bytes += sent.nbytes
    return Exchanged(held, 2 * (hosts - 1), messages, payload_bytes)
