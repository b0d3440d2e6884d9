"""Symbolic memory: what every page slot holds, who touches it, and what lies in a rank's store.

A page's content is a number that stands for its pool and the token prefix whose last page it is, so
the checkers can tell the right page from every wrong one without looking at keys or trees. A recurrent
state stands for the prefix after which it is the state. Numbers below one stand for bytes that belong
to nobody.
"""

from collections.abc import Callable, Mapping

from ..ranks.orders import KV_POOL
from ..ranks.replica.tree import DEVICE, HOST

EMPTY = 0
"""Nothing was ever written here."""
TORN = -1
"""A transfer writes here at this moment."""
GARBAGE = -2
"""A transfer into this slot ended badly."""

Finding = Callable[[str], None]
"""Receives one sentence that says which promise was broken."""


def describe(content: int) -> str:
    """Say in words what a slot holds."""
    names = {EMPTY: "nothing", TORN: "a half-written page", GARBAGE: "garbage"}
    return names.get(content) or f"content {content}"


class Contents:
    """Numbers for token prefixes: equal exactly when pool, namespace and all tokens are equal.

    What was computed before a reset and what is computed after it differ, too, as when the model has
    got new weights in between.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, bytes], int] = {}

    def of(self, namespace: str, prefix: bytes, generation: int = 0, *, pool: str = KV_POOL) -> int:
        """Return the content of the last page of `prefix`, which may be partly filled.

        For a pool of states it is the state after all of `prefix`.
        """
        name = (pool, namespace, generation, prefix)
        return self._numbers.setdefault(name, len(self._numbers) + 1)


class Slots:
    """The page slots of one pool on one tier of one rank.

    An order claims the slots that it names from the moment it is given until its I/O is over. Many
    may read a slot; one that writes must be alone with it.
    """

    def __init__(self, name: str, pages: int, finding: Finding) -> None:
        self.name = name
        self.content = [EMPTY] * pages
        self._writer: list[int | None] = [None] * pages
        self._readers = [0] * pages
        self._finding = finding

    def claim_to_read(self, page: int, operation: int) -> None:
        """Note that `operation` will read the slot."""
        if not self._exists(page, f"operation {operation}"):
            return
        if self._writer[page] is not None:
            self._finding(
                f"operation {operation} reads {self.name} page {page} while operation "
                f"{self._writer[page]} still writes it"
            )
        self._readers[page] += 1

    def claim_to_write(self, page: int, operation: int) -> None:
        """Note that `operation` will write the slot."""
        if not self._exists(page, f"operation {operation}"):
            return
        if self._writer[page] is not None:
            self._finding(
                f"operation {operation} writes {self.name} page {page} while operation "
                f"{self._writer[page]} still writes it"
            )
        elif self._readers[page]:
            self._finding(
                f"operation {operation} writes {self.name} page {page} while "
                f"{self._readers[page]} transfers still read it"
            )
        self._writer[page] = operation

    def finish_reading(self, page: int) -> None:
        """Drop one claim to read."""
        self._readers[page] -= 1

    def finish_writing(self, page: int, operation: int) -> None:
        """Drop the claim to write."""
        if self._writer[page] == operation:
            self._writer[page] = None

    def compute(self, page: int, before: int, after: int, who: str) -> None:
        """Let the model turn the slot's content from `before` to `after`; EMPTY stands for any."""
        if self.touched(page):
            self._finding(
                f"{who} computes into {self.name} page {page} while a transfer touches it"
            )
        if before != EMPTY and self.content[page] != before:
            self._finding(
                f"{who} continues {self.name} page {page}, which holds "
                f"{describe(self.content[page])} instead of {describe(before)}"
            )
        self.content[page] = after

    def fork(self, source: int, destination: int, who: str) -> None:
        """Copy one slot to another at once, as in the engine's own order of work."""
        if not (self._exists(source, who) and self._exists(destination, who)):
            return
        content = self.content[source]
        if content <= EMPTY or self.written(source):
            self._finding(
                f"{who} copies {self.name} page {source}, which holds {describe(content)}"
            )
        if self.touched(destination):
            self._finding(
                f"{who} writes {self.name} page {destination} while a transfer touches it"
            )
        self.content[destination] = content

    def touched(self, page: int) -> bool:
        """Whether some transfer has a claim on the slot."""
        return self._writer[page] is not None or self._readers[page] > 0

    def written(self, page: int) -> bool:
        """Whether some transfer writes, or may still write, the slot."""
        return self._writer[page] is not None

    def claims(self) -> list[int]:
        """Return the slots on which some transfer has a claim."""
        return [page for page in range(len(self.content)) if self.touched(page)]

    def _exists(self, page: int, who: str) -> bool:
        if 0 <= page < len(self.content):
            return True
        self._finding(
            f"{who} names {self.name} page {page}, but the pool has {len(self.content)} pages"
        )
        return False


class Memory:
    """The page slots of one rank: of each pool, on each tier."""

    def __init__(self, pools: Mapping[str, tuple[int, int]], finding: Finding) -> None:
        """`pools` has the number of pages on the device and on the host, by name."""
        self.tiers: tuple[dict[str, Slots], dict[str, Slots]] = ({}, {})
        """By tier (`DEVICE`, `HOST`) and pool."""
        for pool, sizes in pools.items():
            for tier, name in ((DEVICE, "device"), (HOST, "host")):
                self.tiers[tier][pool] = Slots(f"{name} {pool}", sizes[tier], finding)
        self._finding = finding

    @property
    def device(self) -> dict[str, Slots]:
        """The device's slots by pool."""
        return self.tiers[DEVICE]

    @property
    def host(self) -> dict[str, Slots]:
        """The host's slots by pool."""
        return self.tiers[HOST]

    def named(self, tier: int, pool: str) -> Slots:
        """Return the slots of the pool that an order names."""
        if pool not in self.tiers[tier]:
            self._finding(f"an order names the unknown pool {pool!r}")
            pool = KV_POOL
        return self.tiers[tier][pool]


class Store:
    """One rank's objects in storage. It outlives the processes of the group.

    `meanings` is shared by all ranks: a key of a pool stands for one token prefix, everywhere and for
    ever.
    """

    def __init__(self, meanings: dict[tuple[str, bytes], int]) -> None:
        self._objects: dict[tuple[str, bytes], int] = {}
        self._meanings = meanings

    def has(self, pool: str, key: bytes) -> bool:
        """Say whether an object is there."""
        return (pool, key) in self._objects

    def read(self, pool: str, key: bytes) -> int | None:
        """Return the content of an object, or None where there is none."""
        return self._objects.get((pool, key))

    def write(self, pool: str, key: bytes, content: int) -> str | None:
        """Write an object unless it is there, and say what is wrong with its content, if anything."""
        name = (pool, key)
        wrong = None
        if content <= EMPTY:
            wrong = f"stores {describe(content)} under a page key"
        elif self._meanings.setdefault(name, content) != content:
            wrong = f"stores content {content} under the key of content {self._meanings[name]}"
        self._objects.setdefault(name, content)
        return wrong

    def remove(self, pool: str, key: bytes) -> None:
        """Lose one object."""
        self._objects.pop((pool, key), None)

    def lose(self, index: int) -> bool:
        """Lose the object that was written at place `index`, counted around; False if empty."""
        if not self._objects:
            return False
        names = list(self._objects)
        del self._objects[names[index % len(names)]]
        return True

    def __len__(self) -> int:
        return len(self._objects)
