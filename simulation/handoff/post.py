"""Control messages between simulated groups: on their way, lost, late, repeated, and damaged."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from ...ranks.disaggregation.control import Arrival, Control, Handover, encode
from ...ranks.disaggregation.manifest import HandoffManifest
from ...ranks.messages import Backlog
from ..clock import VirtualClock
from .faults import HandoffFault, HandoffTroubles

_OTHERS: tuple[dict[str, Any], ...] = (
    {"weights_version": "other"},
    {"layout_fingerprint": "0" * 64},
    {"namespace_digest": "f" * 64},
    {"tail_key": bytes(32)},
    {"source": "peer://nobody:1"},
)
"""What a manifest may say that is of something else."""


class Mailbox:
    """Where a group takes messages: each gets a number, and reaches every rank when it does."""

    def __init__(self, clock: VirtualClock, random: Random, inboxes: Sequence[Backlog]) -> None:
        self.taken = 0
        self._clock = clock
        self._random = random
        self._inboxes = inboxes

    def take(self, data: bytes) -> None:
        """Hand a message on to every rank."""
        self.taken += 1
        for inbox in self._inboxes:
            delay_us = self._random.randrange(self._random.choice((1, 3_000, 40_000)))
            self._clock.after(delay_us, partial(_note, inbox, self.taken, data))


def _note(inbox: Backlog, number: int, data: bytes) -> None:
    inbox.note(number, data)


class Post:
    """Carries messages to the mailboxes of groups, by address."""

    def __init__(
        self,
        clock: VirtualClock,
        random: Random,
        troubles: HandoffTroubles,
        *,
        coverage: Counter[str],
        trace: Callable[[str], None],
    ) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.on_their_way = 0
        self._clock = clock
        self._random = random
        self._bad = troubles.has(HandoffFault.MESSAGES)
        self._damages = troubles.has(HandoffFault.MANIFEST)
        self._coverage = coverage
        self._trace = trace

    def send(self, to: str, message: Control, *, surely: bool = False) -> None:
        """Send a message, which may come to grief unless it is to arrive `surely`."""
        data = self._damaged(message)
        kind, random = type(message).__name__, self._random
        self._coverage[f"{kind} sent"] += 1
        of = f" of {message.request}" if isinstance(message, Handover | Arrival) else ""
        self._trace(f"to {to}: {kind}{of}")
        if self._bad and not surely and random.random() < 0.12:
            self._coverage["messages lost"] += 1
            return
        # A request that comes twice is another request.
        may_repeat = self._bad and not isinstance(message, Arrival)
        copies = 2 if may_repeat and random.random() < 0.2 else 1
        self._coverage["messages repeated"] += copies - 1
        for _ in range(copies):
            late_us = random.choice((20_000, 300_000, 900_000)) if self._bad else 5_000
            self.on_their_way += 1
            self._clock.after(random.randrange(200, late_us), partial(self._deliver, to, data))

    def _deliver(self, to: str, data: bytes) -> None:
        self.on_their_way -= 1
        mailbox = self.mailboxes.get(to)
        if mailbox is not None:
            mailbox.take(data)

    def _damaged(self, message: Control) -> bytes:
        """Return a message as bytes, which are those of something else now and then."""
        if not (isinstance(message, HandoffManifest) and self._damages):
            return encode(message)
        random, data = self._random, encode(message)
        match random.randrange(4):
            case 0:
                self._coverage["manifests cut short"] += 1
                return data[: random.randrange(len(data))]
            case 1:
                self._coverage["manifests with a flipped bit"] += 1
                at = random.randrange(len(data))
                return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
            case 2:
                self._coverage["manifests of something else"] += 1
                return encode(replace(message, **random.choice(_OTHERS)))
            case _:
                return data
