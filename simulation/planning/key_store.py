"""A simulated store that holds keys without contents, with LRU eviction."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence


class KeyStore:
    """The keys that a group has in its store. Single-threaded.

    A full store evicts the least recently used key first. Among the keys of one prefix, it evicts the
    key of the last page first.
    """

    def __init__(self, object_bytes: Mapping[str, int], bytes_max: int | None = None) -> None:
        """Create the store.

        `object_bytes` has, by pool, the size of a page in the store, summed over all ranks.
        """
        self._object_bytes = object_bytes
        self._bytes_max = bytes_max
        self._held: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """Keys in the order in which they are evicted."""
        self.nbytes = 0

    def has(self, pool: str, key: bytes) -> bool:
        return (pool, key) in self._held

    def read(self, pool: str, keys: Sequence[bytes]) -> int:
        """Read objects in prefix order up to the first missing one; return how many were read."""
        there = next((at for at, key in enumerate(keys) if not self.has(pool, key)), len(keys))
        self._use(pool, keys[:there])
        return there

    def write(self, pool: str, keys: Sequence[bytes]) -> None:
        """Write objects in prefix order, then evict the least recently used objects until all fit."""
        new = sum(not self.has(pool, key) for key in keys)
        self._use(pool, keys)
        self.nbytes += new * self._object_bytes[pool]
        while self._bytes_max is not None and self.nbytes > self._bytes_max:
            (oldest, _), _ = self._held.popitem(last=False)
            self.nbytes -= self._object_bytes[oldest]

    def _use(self, pool: str, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._held[pool, key] = None
            self._held.move_to_end((pool, key))
