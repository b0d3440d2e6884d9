"""Asking after requests: that one has left is told once, and may be told to nobody."""

from collections.abc import Callable
from dataclasses import dataclass

from .control import Control
from .telling import REQUESTS_ASKED_MAX, RequestsTold, RequestsWanted

ASKS_AFTER_S = 10.0
"""How long nothing may be heard of a request before the group that goes on with it is asked."""
ASKS_MAX = 3
"""How often a group is asked in vain before a request counts as lost there."""


@dataclass(slots=True)
class _Followed:
    """A request, and when something was last heard of it or asked."""

    group: str
    since_s: float
    asked: int = 0
    """How often, since something was heard."""


class Inquiries:
    """Asks groups after those of their requests that are silent. Owned by one thread.

    A group answers of each that it is there, how it has left, or that nothing is known of it. So a
    request ends, goes on, or is found to be lost, whatever of what was told did not arrive.
    """

    def __init__(self, reader: str, send: Callable[[str, Control], object]) -> None:
        """`reader` is the inbox that groups answer; `send` sends a message to a group by its name."""
        self._reader = reader
        self._send = send
        self._followed: dict[str, _Followed] = {}

    def heard(self, request: str, group: str, now_s: float) -> None:
        """Note that a group has a request: it took it, or told something of it."""
        self._followed[request] = _Followed(group, now_s)

    def end(self, request: str) -> None:
        """Ask after a request no more."""
        self._followed.pop(request, None)

    def hear(self, message: RequestsTold, now_s: float) -> list[str]:
        """Take an answer; return the requests of which that group knows nothing."""
        for request in message.here:
            if self._is_at(request, message.group):
                self.heard(request, message.group, now_s)
        return [each for each in message.unknown if self._is_at(each, message.group)]

    def ask(self, now_s: float) -> list[str]:
        """Ask after all that are silent; return those after which was asked in vain often enough."""
        in_vain: list[str] = []
        due: dict[str, list[str]] = {}
        for request, each in self._followed.items():
            if now_s - each.since_s > ASKS_AFTER_S:
                each.since_s = now_s
                each.asked += 1
                into = in_vain if each.asked > ASKS_MAX else due.setdefault(each.group, [])
                into.append(request)
        for group, requests in due.items():
            for at in range(0, len(requests), REQUESTS_ASKED_MAX):
                some = tuple(requests[at : at + REQUESTS_ASKED_MAX])
                self._send(group, RequestsWanted(reader=self._reader, requests=some))
        return in_vain

    def _is_at(self, request: str, group: str) -> bool:
        followed = self._followed.get(request)
        return followed is not None and followed.group == group
