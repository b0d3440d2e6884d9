"""The components of a model, made from the settings of a replica."""

from collections.abc import Callable

from .....errors import InternalError
from ....protocol.replica_config import ReplicaConfig
from .base import Component
from .full_attention import FullAttentionComponent
from .recurrent import RecurrentComponent
from .sliding_window import SlidingWindowComponent

_KINDS: dict[str, Callable[[int, str, int], Component]] = {
    SlidingWindowComponent.name: SlidingWindowComponent,
    RecurrentComponent.name: RecurrentComponent,
}
"""Makers by name; each is called with an index, a pool and `every_pages`."""


def components_of(config: ReplicaConfig) -> tuple[Component, ...]:
    """Return the components, full attention first."""
    made: list[Component] = [FullAttentionComponent()]
    for each in config.components:
        if each.kind not in _KINDS:
            raise InternalError(f"there is no component {each.kind!r}")
        made.append(_KINDS[each.kind](len(made), each.pool, each.every_pages))
    return tuple(made)
