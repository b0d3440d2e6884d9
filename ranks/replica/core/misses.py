"""Attribution of cache misses: why a request's tokens are in no tier.

Prefixes that were requested, computed or stored are remembered as 64-bit digests in a table of fixed
size. Only commands and verdicts change the table, so it is equal on every rank. Prefixes are computed
and stored from their beginning, so one remembered page implies all pages before it. The causes of a
missed page are:

    lost        storage or host memory has, or had, the page, and did not deliver it: missing, corrupt,
                late, absent on a rank, or the copy failed
    evicted     requested or computed in the same namespace, and in no tier any more
    other_key   requested only in other namespaces (other tenants, adapters or weights versions)
    never_seen  everything else, including pages whose table slots newer digests have overwritten

The digests of a missed prefix are computed at admission and recorded once the request computes. Pages
beyond the prompt are recorded up to the last whole page of each `insert` or `back_up`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from ...protocol.events import MissedTokens

Digests: TypeAlias = npt.NDArray[np.uint64]

SLOTS_A_PAGE: Final = 16
"""Number of table slots (8 bytes each) per page of cache capacity; a requested page takes two slots."""
SLOTS_MIN: Final = 1 << 12
_TOKEN_BYTES: Final = 4
"""Bytes of one token id; must equal `TOKEN_BYTES` of `tree.tokens`."""


class Sought(NamedTuple):
    """The pages that a request looked for in storage and host memory before its computation."""

    first: int = 0
    """The position of the first page that was requested from storage."""
    keys: Sequence[bytes] = ()
    no_room: bool = False
    """Whether host memory had no room for pages that storage has."""
    failed: int = 0
    """The position after the last page that a load failed to copy to the device; 0 if no load failed.
    """


NOTHING_SOUGHT: Final = Sought()


class Misses:
    """Remembers prefixes seen before, and counts a request's missed tokens by cause."""

    def __init__(self, pages: int = 0) -> None:
        """Size the table for `pages`, the number of pages that all tiers together can hold."""
        slots = 1 << (max(SLOTS_MIN, SLOTS_A_PAGE * pages) - 1).bit_length()
        self._slots: Digests = np.zeros(slots, dtype=np.uint64)
        self._mask = np.uint64(slots - 1)
        self._missed: list[Digests] = []
        """Digests of the pages that requests have missed since the last verdict."""
        self._computed: list[tuple[object, int]] = []
        """Tree identity and digest of each prefix computed since the last verdict."""
        self._salted: tuple[object, int] = None, 0

    def count(
        self, place: object, tokens: bytes, page_tokens: int, cached_tokens: int, sought: Sought
    ) -> tuple[MissedTokens, Sequence[Digests]]:
        """Return (missed tokens by cause, digests of the missed pages) of one request.

        The first `cached_tokens` of `tokens` are not missed. The caller passes the digests to
        `record_lookup` once the request computes.
        """
        requested, step = len(tokens) // _TOKEN_BYTES, page_tokens * _TOKEN_BYTES
        first, last = cached_tokens // page_tokens, requested // page_tokens
        if first >= last:
            return MissedTokens(never_seen=requested - cached_tokens), ()
        anywhere = _prefix_digests(tokens, first, last, step)
        here = anywhere ^ np.uint64(self._salt(place))
        lost = self._end(_of_keys(sought.keys), sought.first) if sought.keys else 0
        evicted = self._end(here, first)
        if sought.no_room:
            lost, evicted = 0, max(lost, evicted)
        ends = [max(lost, sought.failed), evicted, self._end(anywhere, first), last]
        bounds = [cached_tokens]
        for end in ends:
            bounds.append(max(bounds[-1], min(end, last) * page_tokens))
        by_cause = [end - start for start, end in pairwise(bounds)]
        by_cause[-1] += requested - bounds[-1]
        return MissedTokens(*by_cause), (here, anywhere)

    def record_lookup(self, digests: Sequence[Digests]) -> None:
        """Record digests that `count` returned; the next verdict adds them to the table.

        Because the table changes only then, requests that arrive together get the same cause for a
        missed page.
        """
        self._missed += digests

    def computed(self, place: object, digest: int) -> None:
        """Record the digest of a prefix that a request has fully computed."""
        self._computed.append((place, digest))

    def stored(self, keys: Sequence[bytes]) -> None:
        """Record the keys of pages that storage has."""
        if keys:
            self._add(_of_keys(keys))

    def settle(self) -> None:
        """Add to the table the digests of pages requested or computed since the last verdict."""
        if self._missed:
            missed, self._missed = self._missed, []
            self._add(np.concatenate(missed))
        if self._computed:
            computed, self._computed = self._computed, []
            both = [(digest, digest ^ self._salt(place)) for place, digest in computed]
            self._add(np.array(both, dtype=np.uint64).ravel())

    def _add(self, digests: Digests) -> None:
        self._slots[digests & self._mask] = digests

    def _end(self, digests: Digests, first: int) -> int:
        """Return the position after the last page whose digest is in the table; 0 if there is none.

        `digests` are those of the pages from position `first` on.
        """
        found = np.flatnonzero(self._slots[digests & self._mask] == digests)
        return first + int(found[-1]) + 1 if len(found) else 0

    def _salt(self, place: object) -> int:
        known, salt = self._salted
        if place != known:
            salt = xxh3_64_intdigest(repr(place).encode())
            self._salted = place, salt
        return salt


def _prefix_digests(tokens: bytes, first: int, last: int, step: int) -> Digests:
    """Return the digest of each prefix that ends with a page in `[first, last)`."""
    view = memoryview(tokens)
    running = xxh3_64(view[: first * step])
    digests: list[int] = []
    for at in range(first * step, last * step, step):
        running.update(view[at : at + step])
        digests.append(running.intdigest())
    return np.array(digests, dtype=np.uint64)


def _of_keys(keys: Sequence[bytes]) -> Digests:
    whole: Digests = np.frombuffer(b"".join(keys), dtype="<u8").astype(np.uint64)
    return whole[:: len(keys[0]) // 8]
