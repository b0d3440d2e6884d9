"""What can happen to the bytes of an object where it is stored, done on purpose.

It serves fault injection: what a store's own check finds is put where that check looks. The modules
beside this one know how that is done in each store.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from ...page_format.object_name import ObjectName


class DamageKind(StrEnum):
    """What happens to an object, and what it stands for."""

    FLIP = "flip"
    """One bit changes: a medium, a cable or memory that rots."""
    TORN = "torn"
    """All from some byte on is zero: blocks that were not on the disk when the power failed, in a
    file that had its length already."""
    SHORT = "short"
    """The end is missing: a full disk, a transfer that broke off. In a slot, which cannot be shorter,
    other bytes lie in its place."""
    WRONG = "wrong"
    """Another object's bytes, sound as they are, lie under the name: an index that went astray, a
    slot or directory that was used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing to be done to one object."""

    name: ObjectName
    kind: DamageKind
    seed: int
    """Which bit or byte it is follows from it."""
    other: ObjectName | None = None
    """For WRONG: whose bytes."""

    def apply(self, raw: bytes, other: bytes | None) -> bytes | None:
        """Return what becomes of an object (header and payload), or None if that changes nothing.

        `other` is the other object, or None if there is none.
        """
        at = Random(self.seed).randrange(max(1, len(raw)))  # noqa: S311 - the damage is to be repeatable.
        match self.kind:
            case DamageKind.FLIP:
                flipped = bytes(each ^ 1 << self.seed % 8 for each in raw[at : at + 1])
                damaged = raw[:at] + flipped + raw[at + 1 :]
            case DamageKind.TORN:
                damaged = raw[:at].ljust(len(raw), b"\0")
            case DamageKind.SHORT:
                damaged = raw[:at]
            case DamageKind.WRONG:
                damaged = raw if other is None else other
        return None if damaged == raw else damaged
