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

from ...errors import PeerLost
from ...ranks.disaggregation.control import Control, Withdrawn, decode, encode
from ...ranks.disaggregation.dispatcher import Dispatched, Dispatcher, Terms
from ...ranks.disaggregation.event_reader import EventReader
from ...ranks.disaggregation.groups.directory import GroupDirectory, Member
from ...ranks.disaggregation.groups.prefix_index import PrefixIndex
from ...ranks.disaggregation.groups.roster import Roster
from ...ranks.disaggregation.groups.router import Refusal, Role
from ...ranks.disaggregation.inquiries import Inquiries
from ...ranks.disaggregation.messages.leading_inbox import LeadingInbox
from ...ranks.disaggregation.messages.sender import MessageSender
from ...ranks.disaggregation.refusal import Refused
from ...ranks.disaggregation.telling import (
    Counted,
    Drain,
    EventsTold,
    Milestone,
    Progress,
    RequestsTold,
    SnapshotTold,
)
from ...small_engine.handed_requests import arrival_of
from ...small_engine.request import WorkloadRequest
from ..meeting import JOIN_TIMEOUT_S
from .front_counts import FrontCounts
from .groups import StartedGroup
from .membership import RENEWALS
from .result import GroupResult

MESSAGE_DEADLINE_S = 30.0
ATTEMPTS_MAX = 16
"""How often a request is sent before it is refused."""
_LISTS_AGAIN_S = 0.25
_WAITS_S = 0.05
_FITS_NO_GROUP = "fits no group"

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
    is_first_told: bool = False
    """Whether it is counted when its first token was known."""
    computed_us: int = 0
    ready_us: int = 0


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
        lease_s: float = 10.0,
        patience_s: float = 30.0,
    ) -> None:
        """`lease_s` is that of the groups.

        Requests wait for `patience_s` for a group that decodes to be listed again, if none is.
        """
        self.counts = FrontCounts()
        self._groups = {each.name: each for each in groups}
        self._roster = Roster(directory, lease_s * (1 + 1 / RENEWALS))
        self._patience_s = patience_s
        self._lines = lines
        index = PrefixIndex()
        self._dispatcher = Dispatcher(terms, index)
        self._reader = EventReader(index, lines.inbox.address, self._send)
        self._inquiries = Inquiries(lines.inbox.address, self._tell)
        self._concurrency = concurrency
        self._outputs_max = outputs_max
        self._heard = 0
        self._listed_s = 0.0
        self._roles: dict[str, Role] = {}
        """Those of all groups that have come."""
        self._nobody_s: float | None = None
        """Since when no group is there that decodes."""
        self._queue: deque[_Open] = deque()
        self._open: dict[str, _Open] = {}
        """Those that were sent, by the name under which they were."""
        self._told: deque[tuple[Dispatched, bool]] = deque()
        """Those of which the group that decodes was told, and whether it took them, as the sender's
        thread has noted."""
        self._began_s = 0.0
        self._began_us = 0

    def wait_for_groups(self) -> None:
        """Return once the directory lists every group. Raises `PeerLost` for one that does not come."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while len(self._roster.members) < len(self._groups):
            now_s = time.monotonic()
            self._watch(now_s)
            if self.counts.lost or now_s > deadline:
                late = [name for name in self._groups if name not in self._roster.members]
                missing = ", ".join([*self.counts.lost, *late])
                raise PeerLost(f"not all groups have started: {missing}")
            self._lines.inbox.wait(self._heard + 1, _WAITS_S)

    def serve(self, requests: Iterable[Due], on_left: Callable[[int], None]) -> None:
        """Serve all requests, in the order in which they come; return when all have left.

        `on_left` is told how many have. Raises `PeerLost` where no group is left that decodes: at once
        if those that did have ended, otherwise when none has come back in time.
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
            moved |= self._dispatch(now_s)
            if self.counts.left > left:
                on_left(self.counts.left)
            if not moved:
                self._wait(following)

    def drain(self, role: Role) -> list[str]:
        """Tell the groups of a role that no more requests come; return their names."""
        names = [name for name in self._roster.members if self._roles[name] is role]
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
        while self._told:
            begun, is_taken = self._told.popleft()
            if not is_taken:
                self._send_elsewhere(begun.request)
            elif begun.request in self._dispatcher:
                self._inquiries.heard(begun.request, begun.decode, now_s)
        if now_s - self._listed_s < _LISTS_AGAIN_S:
            return
        self._listed_s = now_s
        gone, came = self._roster.look(now_s, self._groups)
        for name in gone:
            self._lose(name)
        for member in came:
            self._join(member, now_s)
        self._reader.ask_again(now_s)
        for request in self._inquiries.ask(now_s):
            self._send_elsewhere(request)

    def _join(self, member: Member, now_s: float) -> None:
        name, address = member.registration.name, member.registration.addresses["messages"]
        self._roles[name] = member.registration.role
        if member.registration.role is not Role.PREFILL:
            self._nobody_s = None
        self._dispatcher.join(member)
        self._reader.follow(name, address, member.life, now_s)

    def _lose(self, name: str) -> None:
        """Send the requests of a group that is gone elsewhere, or have them computed where they go on.

        One of which the ranks have ended does not come back.
        """
        if self._groups[name].status() is not None:
            del self._groups[name]
        if name not in self.counts.lost:
            self.counts.lost.append(name)
        self._roster.forget(name)
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
        self._inquiries.end(name)
        if had is None:
            return
        self._tell(had.prefill, Withdrawn(request=name))
        opened = self._open.pop(name)
        if opened.attempts >= ATTEMPTS_MAX:
            self._refused(opened, f"was sent {ATTEMPTS_MAX} times, and no group came to its end")
            return
        self.counts.sent_again += 1
        opened.computed_us = opened.ready_us = 0
        self._queue.appendleft(opened)

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
                    self._follow(message, now_s)
                case RequestsTold():
                    for each in message.ended:
                        self._follow(each, now_s)
                    for name in self._inquiries.hear(message, now_s):
                        self._send_elsewhere(name)
                case Counted():
                    self._lines.results[message.group] = GroupResult.unpack(message.data)
                case _:
                    pass
        self._lines.inbox.let_go(self._heard)
        return moved

    def _follow(self, message: Progress, now_s: float) -> None:
        sent = self._dispatcher.hear(message)
        if sent is None:
            return
        request = self._open[message.request]
        if message.group == sent.decode:
            self._inquiries.heard(message.request, sent.decode, now_s)
        if message.stage == Milestone.COMPUTED and not request.computed_us:
            request.computed_us = message.at_us
            if not request.is_first_told:
                request.is_first_told = True
                due_us = self._began_us + int(1e6 * request.due.at_s)
                self.counts.first_tokens_us.append(message.at_us - due_us)
        elif message.stage == Milestone.READY:
            request.ready_us = message.at_us
        if message.request not in self._dispatcher:
            self._inquiries.end(message.request)
            del self._open[message.request]
            if message.stage == Milestone.DONE:
                self._served(request)
            else:
                self._refused(request, _FITS_NO_GROUP)

    def _served(self, request: _Open) -> None:
        self.counts.served += 1
        self.counts.prompt_tokens += request.due.request.prompt_length
        # Each group tells of its own, and what one tells may overtake what the other does.
        if request.computed_us and request.ready_us:
            self.counts.handoffs_us.append(request.ready_us - request.computed_us)

    def _refused(self, request: _Open, why: str) -> None:
        due = request.due.request
        self.counts.refused += 1
        self.counts.refusals.append(f"{due.name} of {due.prompt_length} tokens {why}")

    def _dispatch(self, now_s: float) -> bool:
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
                self._refused(self._queue.popleft(), _FITS_NO_GROUP)
                continue
            if isinstance(choice, Refusal):
                self._wait_for_somebody(choice, now_s)
                break
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

    def _wait_for_somebody(self, why: Refusal, now_s: float) -> None:
        """Raise `PeerLost` unless a group that decodes may be listed again, and there is time left."""
        if self._nobody_s is None:
            self._nobody_s = now_s
        may_come = any(self._roles.get(each) is not Role.PREFILL for each in self._groups)
        if not may_come or now_s - self._nobody_s > self._patience_s:
            lost = ", ".join(self.counts.lost)
            raise PeerLost(
                f"requests cannot be served any more: {why.value}; lost: {lost or 'none'}"
            )

    def _begin(self, opened: _Open, begun: Dispatched) -> None:
        """Tell the group that decodes, and once it has heard, the one that computes.

        So what the one says about the request never reaches the other before the request does.
        """
        decode_at, prefill_at = self._address(begun.decode), self._address(begun.prefill)
        arrival = arrival_of(opened.due.request, prefill_at, name=begun.request)

        def tell(outcome: "Future[int]") -> None:
            is_taken = outcome.exception() is None
            self._told.append((begun, is_taken))
            if is_taken and prefill_at:
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
