"""How much of a token run is cached."""

from dataclasses import dataclass

from .state import ReplicaState
from .tree import DEVICE, HOST, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of a token run is cached. Lengths in tokens, always whole pages."""

    device_tokens: int
    """The prefix whose pages are on the device; 0 where the engine owns those."""
    host_tokens: int
    """The prefix that can be restored from device and host memory (to `best_match_node`)."""


def match(state: ReplicaState, place: Place, tokens: bytes) -> Match:
    """Return how much of `tokens` is cached. Changes nothing."""
    root = state.tree.roots.get(place)
    if root is None:
        return Match(device_tokens=0, host_tokens=0)
    walk = state.tree.walk(root, tokens)
    device = best = 0
    on_device = True
    ends = [(node, node.end) for node in walk.nodes]
    if walk.partial is not None:
        ends.append((walk.partial, walk.partial.start + walk.partial_pages))
    for node, end in ends:
        if not state.component.may_end(node, (DEVICE, HOST)):
            break
        best = end
        on_device = on_device and state.component.may_end(node, (DEVICE,))
        device = end if on_device else device
    unit = state.config.page_tokens
    return Match(device_tokens=device * unit, host_tokens=best * unit)
