"""Proposals: changes that reach single ranks from outside, until all ranks have them (rule R14).

Whoever wants the group to change tells every rank, at any time and in any order. A rank that was told
*stages* the proposal: it prepares what the change needs, in the background, and says in each of its
ballots what it has staged and how ready it is. Once all ranks have staged the same and are ready, a
verdict makes it a command, in the same step on every rank. A proposal is known by its content: ranks
that were told the same in one campaign or in two have staged the same.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import xxhash


class Change(IntEnum):
    """The changes that can be proposed."""

    DETACH = 0
    """Use the store no more."""
    ATTACH = 1
    """Use a store."""


class Readiness(IntEnum):
    """How far a rank is with a proposal; a level, but that what was ready may be lost again."""

    REFUSED = -1
    """It cannot be done here."""
    UNSTAGED = 0
    """This rank was not told of it, as far as it can say."""
    STAGED = 1
    """It is being prepared."""
    READY = 2
    """It could be done in the next step."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change that was proposed."""

    change: Change
    store: str = field(default="", repr=False)
    """The URI of the store to attach, as it was given: the same text on every rank. It may have a
    password in it."""

    @property
    def digest(self) -> int:
        """62 bits that stand for the proposal, never 0; `change_of` reads the change from them."""
        text = f"{self.change.name} {self.store!a}"
        return (xxhash.xxh3_64_intdigest(text.encode()) >> 3 | 1) << 1 | self.change


def change_of(digest: int) -> Change:
    """Return what a proposal changes, also one that this rank was not told of."""
    return Change(digest & 1)


@dataclass(frozen=True, slots=True)
class Staged:
    """The proposal that a rank has staged, as its ballot says."""

    proposal: int
    """The digest of the proposal."""
    readiness: Readiness


NOTHING_STAGED = Staged(0, Readiness.UNSTAGED)
