"""Revived bugs that permanently prevent cache hits without any fault."""

from collections.abc import Iterable, Sequence

from ...ranks.replica.operations.backing_up import BackingUp
from ...ranks.replica.operations.kinds import Segment
from ...ranks.replica.operations.lent import Lent
from ...ranks.replica.operations.persisting import Persisting
from ...ranks.replica.operations.store import Store
from ...ranks.replica.parts import Parts
from ...ranks.replica.tree.backlog import Undone
from ...ranks.replica.tree.node import Node
from ..rank.epoch import Build


def write_once() -> Build:
    """Return a build that never retries a failed persist."""
    return Build(parts=Parts(persisting=_WritesOnce))


class _WritesOnce(Persisting):
    def _postpone(self, segments: Iterable[Segment], cause: Undone) -> None:
        del segments, cause


def trust_for_good() -> Build:
    """Return a build that never rewrites pages that the store once accepted, even if they were lost."""
    return Build(parts=Parts(store=_TrustsForGood))


class _TrustsForGood(Store):
    def invalidate_stored(self, node: Node) -> bool:
        del node
        return False


def back_up_once() -> Build:
    """Return a build that never retries a backup that found too few free host pages."""
    return Build(parts=Parts(backing_up=_BacksUpOnce))


class _BacksUpOnce(BackingUp):
    def _postpone(self, ends: Sequence[Node], lent: Lent | None) -> None:
        del ends, lent
