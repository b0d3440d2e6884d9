"""The writers of pages that all ranks hold alike.

A page whose content is replicated (latent attention) is one object of one name for all ranks, which
every rank reads and one rank writes. Who writes it follows from its key alone, so ranks need not ask
each other, and the work is spread over them as evenly as hashes are.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterShare:
    """One rank's share of the replicated pages: those whose writer it is."""

    rank: int
    world_size: int

    def has(self, key: bytes) -> bool:
        """Say whether this rank is the writer of the page with this key."""
        return int.from_bytes(key[:8], "big") % self.world_size == self.rank


EVERYTHING = WriterShare(rank=0, world_size=1)
"""The share of a rank whose store no other rank reads."""
