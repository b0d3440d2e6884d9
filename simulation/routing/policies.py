"""The policies that are compared: each names a group for a request."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from ...errors import InternalError
from ...ranks.disaggregation.groups.prefix_index import Hit
from ...ranks.disaggregation.groups.router import Choice, Group, Prompt, Role, route

_NO_HIT = Hit(0, 0)


class Policy(NamedTuple):
    """A way to choose."""

    name: str
    about: str
    choose: Callable[[Sequence[Group], Prompt], str]
    """Names one of the groups, which stand in the same order each time."""
    asks: bool
    """Whether it asks what groups have cached."""


def policies() -> list[Policy]:
    """Return all policies, each at its beginning."""
    turns = count()

    def in_turn(groups: Sequence[Group], prompt: Prompt) -> str:
        del prompt
        return groups[next(turns) % len(groups)].name

    return [
        Policy("round robin", "one group after the other", in_turn, asks=False),
        Policy("load", "the group with the least to compute", _least_loaded, asks=False),
        Policy("hits", "the longest prefix, then load", _longest_prefix, asks=True),
        Policy("own time", "the least time to this first token", _selfish, asks=True),
        Policy("lockstep", "the least time for this request and for others", _ours, asks=True),
    ]


def _least_loaded(groups: Sequence[Group], prompt: Prompt) -> str:
    del prompt
    return min(groups, key=lambda group: (group.queued_tokens, group.name)).name


def _longest_prefix(groups: Sequence[Group], prompt: Prompt) -> str:
    def order(group: Group) -> tuple[int, int, str]:
        return -prompt.hits.get(group.name, _NO_HIT).pages, group.queued_tokens, group.name

    return min(groups, key=order).name


def _routed(groups: Sequence[Group], prompt: Prompt, *, selfish: bool) -> str:
    decoding = Group(name="decoding", role=Role.DECODE, tokens_max=1 << 40)
    choice = route([*groups, decoding], prompt, selfish=selfish)
    if not isinstance(choice, Choice):
        raise InternalError(f"a request was refused: {choice}")
    return choice.prefill


_selfish = partial(_routed, selfish=True)
_ours = partial(_routed, selfish=False)
