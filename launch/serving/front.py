"""The front of a run: it lets requests come, sends each to its groups, and follows how it goes.

It is a client of the groups like any other: it finds them in the directory, reads their KV events, and
sends them control messages. Requests of a group that is lost go elsewhere.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from ...errors import PeerLost, StorageError
from ...ranks.disaggregation.control import Control, Withdrawn, decode, encode
from ...ranks.disaggregation.dispatcher import Dispatched, Dispatcher, Terms
from ...ranks.disaggregation.event_reader import EventReader
from ...ranks.disaggregation.groups.directory import GroupDirectory
from ...ranks.disaggregation.groups.prefix_index import PrefixIndex
from ...ranks.disaggregation.groups.router import Refusal, Role
from ...ranks.disaggregation.messages.leading_inbox import LeadingInbox
from ...ranks.disaggregation.messages.sender import MessageSender
from ...ranks.disaggregation.refusal import Refused
from ...ranks.disaggregation.telling import (
    Counted,
    Drain,
    EventsTold,
    Milestone,
    Progress,
    SnapshotTold,
)
from ...small_engine.handed_requests import arrival_of
from ...small_engine.request import WorkloadRequest
from ..meeting import JOIN_TIMEOUT_S
from .groups import StartedGroup
from .result import GroupResult

MESSAGE_DEADLINE_S = 30.0
_LISTS_AGAIN_S = 0.25
_WAITS_S = 0.05

log = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class Due:
    """A request, and when it comes, in seconds from the beginning."""

    at_s: float
    request: WorkloadRequest


@dataclass(slots=True)
class _Open:
    """A request in the system."""

    due: Due
    attempts: int = 0
    computed_us: int = 0


@dataclass(slots=True, kw_only=True)
class FrontCounts:
    """What the front has seen."""

    served: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list[str])
    sent_again: int = 0
    """Requests that were sent to other groups since theirs were lost."""
    prompt_tokens: int = 0
    routed_tokens: int = 0
    """Prompt tokens of all requests, each as often as it was sent."""
    routed_hit_tokens: int = 0
    """Prompt tokens that the chosen groups had, as the router knew."""
    handoffs_us: list[int] = field(default_factory=list[int])
    """From the end of a prompt's last chunk to READY at the group that decodes."""
    first_tokens_us: list[int] = field(default_factory=list[int])
    """From when a request was to come until its prompt was computed."""
    lost: list[str] = field(default_factory=list[str])
    """Groups that were lost."""

    @property
    def left(self) -> int:
        """How many requests have left."""
        return self.served + self.refused


@dataclass(frozen=True, slots=True)
class Lines:
    """How the front and the groups reach each other."""

    inbox: LeadingInbox
    sender: MessageSender
    results: dict[str, GroupResult] = field(default_factory=dict[str, GroupResult])
    """What groups have told that they have counted, by name."""


class Front:
    """Serves a workload by the groups of a directory. Owned by one thread."""

    def __init__(
        self,
        groups: Sequence[StartedGroup],
        directory: GroupDirectory,
        terms: Terms,
        lines: Lines,
        *,
        concurrency: int,
        outputs_max: int,
    ) -> None:
        self.counts = FrontCounts()
        self._groups = {each.name: each for each in groups}
        self._directory = directory
        self._lines = lines
        index = PrefixIndex()
        self._dispatcher = Dispatcher(terms, index)
        self._reader = EventReader(index, lines.inbox.address, self._send)
        self._concurrency = concurrency
        self._outputs_max = outputs_max
        self._heard = 0
        self._listed_s = 0.0
        self._lives: dict[str, int] = {}
        """The groups that are there, with the life that each was seen in."""
        self._queue: deque[_Open] = deque()
        self._open: dict[str, _Open] = {}
        """Those that were sent, by the name under which they were."""
        self._unheard: deque[str] = deque()
        """Those of which a group could not be told, as the sender's thread has noted."""
        self._began_s = 0.0
        self._began_us = 0

    def wait_for_groups(self) -> None:
        """Return once the directory lists every group. Raises `PeerLost` for one that does not come."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while len(self._lives) < len(self._groups):
            now_s = time.monotonic()
            self._watch(now_s)
            if self.counts.lost or now_s > deadline:
                late = [name for name in self._groups if name not in self._lives]
                missing = ", ".join([*self.counts.lost, *late])
                raise PeerLost(f"not all groups have started: {missing}")
            self._lines.inbox.wait(self._heard + 1, _WAITS_S)

    def serve(self, requests: Iterable[Due], on_left: Callable[[int], None]) -> None:
        """Serve all requests, in the order in which they come; return when all have left.

        `on_left` is told how many have. Raises `PeerLost` where no group is left that decodes.
        """
        self._began_s, self._began_us = time.monotonic(), time.time_ns() // 1000
        coming = iter(requests)
        following = next(coming, None)
        while following is not None or self._queue or self._open:
            now_s = time.monotonic()
            while following is not None and following.at_s <= now_s - self._began_s:
                self._queue.append(_Open(following))
                following = next(coming, None)
            self._watch(now_s)
            left = self.counts.left
            moved = self._hear(now_s)
            moved |= self._dispatch()
            if self.counts.left > left:
                on_left(self.counts.left)
            if not moved:
                self._wait(following)

    def drain(self, role: Role) -> list[str]:
        """Tell the groups of a role that no more requests come; return their names."""
        members = {name: self._dispatcher.member(name) for name in self._lives}
        names = [
            each for each, m in members.items() if m is not None and m.registration.role is role
        ]
        for name in names:
            self._tell(name, Drain())
        return names

    def listen(self) -> None:
        """Take the messages that come while groups end."""
        self._hear(time.monotonic())

    def _wait(self, following: Due | None) -> None:
        wait_s = _WAITS_S
        if following is not None:
            wait_s = min(wait_s, following.at_s - (time.monotonic() - self._began_s))
        if wait_s > 0:
            self._lines.inbox.wait(self._heard + 1, wait_s)

    def _watch(self, now_s: float) -> None:
        """See which groups have come, and which are lost."""
        for name in [each for each in self._groups if self._groups[each].status() is not None]:
            self._lose(name)
        while self._unheard:
            self._send_elsewhere(self._unheard.popleft())
        if now_s - self._listed_s < _LISTS_AGAIN_S:
            return
        self._listed_s = now_s
        try:
            members = self._directory.groups().members
        except StorageError:
            # Those that were there are taken to be there still, until it answers again.
            return
        listed = {each.registration.name: each for each in members}
        for name in [each for each in self._lives if each not in listed]:
            self._lose(name)
        for name, member in listed.items():
            if name in self._groups and self._lives.get(name, -1) < member.life:
                self._lives[name] = member.life
                self._dispatcher.join(member)
                address = member.registration.addresses["messages"]
                self._reader.follow(name, address, member.life, now_s)
        self._reader.ask_again(now_s)

    def _lose(self, name: str) -> None:
        """Send the requests of a group that is gone elsewhere, or have them computed where they go on.

        One of which the ranks have ended does not come back.
        """
        if self._groups[name].status() is not None:
            del self._groups[name]
        if name not in self.counts.lost:
            self.counts.lost.append(name)
        self._lives.pop(name, None)
        self._reader.forget(name)
        for had in self._dispatcher.lose(name):
            if had.decode == name:
                self._send_elsewhere(had.request)
            else:
                self._dispatcher.computes_here(had.request, had.decode)
                self._tell(had.decode, Withdrawn(request=had.request))

    def _send_elsewhere(self, name: str) -> None:
        """Let a request begin anew, before all that wait."""
        had = self._dispatcher.end(name)
        if had is not None:
            self._tell(had.prefill, Withdrawn(request=name))
            self.counts.sent_again += 1
            self._queue.appendleft(self._open.pop(name))

    def _hear(self, now_s: float) -> bool:
        """Take all messages that have come."""
        count = self._lines.inbox.count
        moved = count > self._heard
        while self._heard < count:
            self._heard += 1
            try:
                message = decode(self._lines.inbox.read(self._heard))
            except Refused as refused:
                log.warning("a message to the front was not read: %s", refused)
                continue
            match message:
                case EventsTold() | SnapshotTold():
                    self._reader.hear(message, now_s)
                case Progress():
                    self._follow(message)
                case Counted():
                    self._lines.results[message.group] = GroupResult.unpack(message.data)
                case _:
                    pass
        self._lines.inbox.let_go(self._heard)
        return moved

    def _follow(self, message: Progress) -> None:
        if self._dispatcher.hear(message) is None:
            return
        request = self._open[message.request]
        if message.stage == Milestone.COMPUTED and not request.computed_us:
            request.computed_us = message.at_us
            due_us = self._began_us + int(1e6 * request.due.at_s)
            self.counts.first_tokens_us.append(message.at_us - due_us)
        elif message.stage == Milestone.READY and request.computed_us:
            self.counts.handoffs_us.append(message.at_us - request.computed_us)
        if message.request not in self._dispatcher:
            del self._open[message.request]
            self._left(request, served=message.stage == Milestone.DONE)

    def _left(self, request: _Open, *, served: bool) -> None:
        counts, due = self.counts, request.due.request
        if served:
            counts.served += 1
            counts.prompt_tokens += due.prompt_length
        else:
            counts.refused += 1
            counts.refusals.append(f"{due.name} of {due.prompt_length} tokens fits no group")

    def _dispatch(self) -> bool:
        """Send requests to groups, the first to come first."""
        moved = False
        while self._queue and len(self._open) < self._concurrency:
            request = self._queue[0].due.request
            most = self._outputs_max
            outputs = min(request.output_length, most) if most else request.output_length
            tokens = request.prompt_tokens.astype(np.int32, copy=False)
            choice = self._dispatcher.choose(tokens, outputs, request.namespace)
            if choice is Refusal.NO_ROOM:
                break
            if choice is Refusal.TOO_LONG:
                self._left(self._queue.popleft(), served=False)
                continue
            if isinstance(choice, Refusal):
                lost = ", ".join(self.counts.lost)
                raise PeerLost(
                    f"requests cannot be served any more: {choice.value}; lost: {lost or 'none'}"
                )
            opened = self._queue.popleft()
            opened.attempts += 1
            name = request.name if opened.attempts == 1 else f"{request.name}~{opened.attempts}"
            now_us = time.time_ns() // 1000
            begun = self._dispatcher.begin(name, len(tokens), outputs, choice, now_us)
            self._open[name] = opened
            self.counts.routed_tokens += len(tokens)
            self.counts.routed_hit_tokens += choice.hit_tokens
            self._begin(opened, begun)
            moved = True
        return moved

    def _begin(self, opened: _Open, begun: Dispatched) -> None:
        """Tell the group that decodes, and once it has heard, the one that computes.

        So what the one says about the request never reaches the other before the request does.
        """
        decode_at, prefill_at = self._address(begun.decode), self._address(begun.prefill)
        arrival = arrival_of(opened.due.request, prefill_at, name=begun.request)

        def tell(outcome: "Future[int]") -> None:
            if outcome.exception() is not None:
                self._unheard.append(begun.request)
            elif prefill_at:
                self._send(prefill_at, replace(arrival, partner=decode_at))

        self._send(decode_at, arrival).add_done_callback(tell)

    def _tell(self, group: str, message: Control) -> None:
        """Send a message to a group that is there."""
        address = self._address(group)
        if address:
            self._send(address, message)

    def _address(self, group: str) -> str:
        """Return the inbox of a group; nothing where it is not there."""
        member = self._dispatcher.member(group)
        return "" if member is None else member.registration.addresses["messages"]

    def _send(self, to: str, message: Control) -> "Future[int]":
        return self._lines.sender.send(to, encode(message), deadline_s=MESSAGE_DEADLINE_S)
