"""Proposals: changes that an operator sends to every rank, applied once all ranks are ready (rule R14).

Proposals arrive at any time and in any order. A rank that receives a proposal *stages* it: the rank
prepares the change in the background and reports the proposal's digest and its readiness in each
ballot. Once all ranks have staged the same proposal and are ready, a verdict turns the proposal into a
command in the same step on every rank. Proposals are identified by content, so a proposal that is
delivered twice is still one proposal.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import xxhash


class Change(IntEnum):
    """The changes that can be proposed."""

    DETACH = 0
    """Detach the store: stop using it."""
    ATTACH = 1
    """Attach a store: start using it."""


class Readiness(IntEnum):
    """How far a rank has prepared a proposal. The readiness falls if a prepared change is lost."""

    REFUSED = -1
    """This rank cannot apply the proposal."""
    UNSTAGED = 0
    """This rank has not staged the proposal."""
    STAGED = 1
    """This rank is preparing the change."""
    READY = 2
    """This rank could apply the change in the next step."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed change."""

    change: Change
    store: str = field(default="", repr=False)
    """The URI of the store to attach, as sent: the same text on every rank. May contain a password."""

    @property
    def digest(self) -> int:
        """A 62-bit digest of the proposal, never 0; `change_of` decodes the kind of change from it."""
        text = f"{self.change.name} {self.store!a}"
        return (xxhash.xxh3_64_intdigest(text.encode()) >> 3 | 1) << 1 | self.change


def change_of(digest: int) -> Change:
    """Return the kind of change encoded in a proposal's digest, without needing the proposal itself."""
    return Change(digest & 1)


@dataclass(frozen=True, slots=True)
class StagedLanes:
    """The proposal that a rank has staged, as reported in its ballot."""

    proposal: int
    readiness: Readiness


NOTHING_STAGED = StagedLanes(0, Readiness.UNSTAGED)
