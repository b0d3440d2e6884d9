"""Why tokens that a request asks for are in no tier, as far as the replica can know it.

What was asked for, computed and stored is remembered as 64-bit digests in a table of fixed size. All of
it follows from commands and verdicts, so the answers are the same on every rank. A prefix is computed
and stored from its beginning on, so the last page of a prompt that is remembered says so of all pages
before it:

    lost        storage or host memory has, or had, it, and did not bring it: gone, damaged, late,
                lacking on a rank, or its copy has failed
    evicted     it was asked for or computed in the same namespace, and no tier has it any more
    other_key   only other namespaces (tenants, adapters, former weights) have asked for it
    never_seen  all else, and what was seen so long ago that newer digests have taken its slots

The digests of a page's prefix are taken once, when a request is admitted that misses it, and count as
seen once it computes. What a request computes beyond its prompt is remembered up to the last whole
page of each `insert` or `back_up`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from ...protocol.notices import MissedTokens

Digests: TypeAlias = npt.NDArray[np.uint64]

SLOTS_A_PAGE: Final = 16
"""Of 8 bytes. A page that was asked for takes two, so several times as many as fit are remembered."""
SLOTS_MIN: Final = 1 << 12
_TOKEN_BYTES: Final = 4
"""As `tree.tokens` has them."""


class Sought(NamedTuple):
    """The pages that a request has looked for in lower tiers, until it computes."""

    first: int = 0
    """The position of the first page that it has asked storage for."""
    keys: Sequence[bytes] = ()
    no_room: bool = False
    """Whether host memory had no room for what storage has of it."""
    failed: int = 0
    """The position after the last page that a load has failed to bring to the device."""


NOTHING_SOUGHT: Final = Sought()


class Misses:
    """Remembers what was seen, and counts what a request misses by cause."""

    def __init__(self, pages: int = 0) -> None:
        """`pages` is how many pages of tokens all tiers have room for."""
        slots = 1 << (max(SLOTS_MIN, SLOTS_A_PAGE * pages) - 1).bit_length()
        self._slots: Digests = np.zeros(slots, dtype=np.uint64)
        self._mask = np.uint64(slots - 1)
        self._asked: list[Digests] = []
        """The digests of the pages that requests have missed since the last verdict."""
        self._computed: list[tuple[object, int]] = []
        """The places and digests of the prefixes computed since the last verdict."""
        self._salted: tuple[object, int] = None, 0

    def count(
        self, place: object, tokens: bytes, page_tokens: int, cached_tokens: int, sought: Sought
    ) -> tuple[MissedTokens, Sequence[Digests]]:
        """Return how many of `tokens` beyond the first `cached_tokens` are missed, by cause.

        And their digests, for `asked` once the request computes.
        """
        asked, step = len(tokens) // _TOKEN_BYTES, page_tokens * _TOKEN_BYTES
        first, last = cached_tokens // page_tokens, asked // page_tokens
        if first >= last:
            return MissedTokens(never_seen=asked - cached_tokens), ()
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
        by_cause[-1] += asked - bounds[-1]
        return MissedTokens(*by_cause), (here, anywhere)

    def asked(self, digests: Sequence[Digests]) -> None:
        """Remember what `count` has told, from the next verdict on.

        So requests that arrive together have the same cause.
        """
        self._asked += digests

    def computed(self, place: object, digest: int) -> None:
        """Remember the prefix, with this digest, of which a request has computed all pages."""
        self._computed.append((place, digest))

    def stored(self, keys: Sequence[bytes]) -> None:
        """Remember the keys of pages that storage has."""
        if keys:
            self._add(_of_keys(keys))

    def settle(self) -> None:
        """Remember what was asked for and computed before this verdict."""
        if self._asked:
            asked, self._asked = self._asked, []
            self._add(np.concatenate(asked))
        if self._computed:
            computed, self._computed = self._computed, []
            both = [(digest, digest ^ self._salt(place)) for place, digest in computed]
            self._add(np.array(both, dtype=np.uint64).ravel())

    def _add(self, digests: Digests) -> None:
        self._slots[digests & self._mask] = digests

    def _end(self, digests: Digests, first: int) -> int:
        """Return the position after the last page that is remembered; 0 if none is."""
        found = np.flatnonzero(self._slots[digests & self._mask] == digests)
        return first + int(found[-1]) + 1 if len(found) else 0

    def _salt(self, place: object) -> int:
        known, salt = self._salted
        if place != known:
            salt = xxh3_64_intdigest(repr(place).encode())
            self._salted = place, salt
        return salt


def _prefix_digests(tokens: bytes, first: int, last: int, step: int) -> Digests:
    """Return the digest of the prefix that ends with each of the pages from `first` to `last`."""
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
