"""A store of which only the keys are kept: what is in it, and what leaves it when it is full."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence


class KeyStore:
    """What the store of a group has. Single-threaded.

    When it is full, what was written or read longest ago leaves first, and of a prefix the last page
    before the first.
    """

    def __init__(self, object_bytes: Mapping[str, int], bytes_max: int | None = None) -> None:
        """`object_bytes` is what a page of each pool takes, of all ranks together."""
        self._object_bytes = object_bytes
        self._bytes_max = bytes_max
        self._held: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """In the order in which they would leave."""
        self.nbytes = 0

    def has(self, pool: str, key: bytes) -> bool:
        return (pool, key) in self._held

    def read(self, pool: str, keys: Sequence[bytes]) -> int:
        """Read objects in prefix order; return how many there are before the first that is missing."""
        there = next((at for at, key in enumerate(keys) if not self.has(pool, key)), len(keys))
        self._use(pool, keys[:there])
        return there

    def write(self, pool: str, keys: Sequence[bytes]) -> None:
        """Write objects in prefix order, and let others leave where there is no room."""
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
