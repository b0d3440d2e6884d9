"""Checksums of host pages whose bytes nothing else checks: those of retracted requests (incident E).

A page of the tree is one of many copies of what its key stands for; what a retracted request has left
in host memory is the only one. It is sealed when it is copied there, and the seal is broken, in either
sense, when it is copied back.
"""

from collections.abc import Mapping, Sequence

import xxhash

from ...errors import StorageError
from ..protocol.orders import CopyTransfer
from .pools import TierPools


class SealBroken(StorageError):
    """A host page does not hold the bytes that were sealed."""


class Seals:
    """The checksums by pool and host page. One thread seals a page, and later ones check it."""

    def __init__(self, pools: Mapping[str, TierPools]) -> None:
        self._pools = pools
        self._known: dict[tuple[str, int], int] = {}

    def seal(self, transfers: Sequence[CopyTransfer]) -> None:
        """Remember the bytes of the pages that sealed transfers have copied to the host."""
        for transfer in transfers:
            for page in transfer.destinations if transfer.sealed else ():
                self._known[transfer.pool, page] = self._checksum(transfer.pool, page)

    def check(self, transfer: CopyTransfer) -> None:
        """Raise `SealBroken` unless the pages of a sealed transfer to the device are as sealed."""
        for page in transfer.sources if transfer.sealed else ():
            if self._known.pop((transfer.pool, page), None) != self._checksum(transfer.pool, page):
                raise SealBroken(
                    f"host page {page} of pool {transfer.pool!r} does not hold what was saved there"
                )

    def _checksum(self, pool: str, page: int) -> int:
        return xxhash.xxh3_64_intdigest(self._pools[pool].host.page(page))
