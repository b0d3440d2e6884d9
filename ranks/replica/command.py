"""What makes a method of the replica a command: its effects come with its answer."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..protocol.effects import Effects, Outbox
from .tree.prefixes import Prefixes


class Commanded(Protocol):
    """A replica, as far as commands need it."""

    prefixes: Prefixes
    outbox: Outbox


_P = ParamSpec("_P")
_R = TypeVar("_R", bound=Commanded)
_T = TypeVar("_T")


def command(
    method: Callable[Concatenate[_R, _P], _T],
) -> Callable[Concatenate[_R, _P], tuple[_T, Effects]]:
    """Let a method of the replica return its effects beside its answer."""

    def with_effects(self: _R, /, *args: _P.args, **kwargs: _P.kwargs) -> tuple[_T, Effects]:
        answer = method(self, *args, **kwargs)
        self.prefixes.mend()
        return answer, self.outbox.collect()

    # Without the type that it gives, which hides that the first argument is the replica.
    update_wrapper(with_effects, method)
    return with_effects
