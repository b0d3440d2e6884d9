"""Messages to other groups: sent in the background, and repeated until they are taken or late."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from ....errors import ConfigError, UsageError
from ....storage_backends.host_port import require_secret, split_address
from ..refusal import Refusal, Refused
from .loop_thread import LoopThread
from .sending_line import Letter, SendingLine

DEADLINE_S_MAX = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSettings:
    """How much a sender keeps for others."""

    secret: bytes = field(default=b"", repr=False)
    """What all groups and routers have in common; see `InboxSettings`."""
    message_bytes: int = 8 << 20
    """Bytes of one message."""
    messages_waiting: int = 128
    """Messages to one address that are not taken yet."""
    addresses: int = 256
    """Addresses that messages are under way to."""
    idle_s: float = 30.0
    """How long a connection is kept that nothing is sent over."""

    def __post_init__(self) -> None:
        for name in ("message_bytes", "messages_waiting", "addresses"):
            value = getattr(self, name)
            if not 0 < value < 1 << 31:
                raise ConfigError(f"{name} of a sender is {value}, must be 1 to {(1 << 31) - 1}")
        if not 0 < self.idle_s <= DEADLINE_S_MAX:
            raise ConfigError(
                f"idle_s of a sender is {self.idle_s}, must be more than 0 and at most"
                f" {DEADLINE_S_MAX:g}"
            )


class MessageSender:
    """Sends messages to the inboxes of groups, on a thread of its own. Thread-safe.

    To one address messages go over one connection, in the order in which they were sent, unless one has
    to be repeated. A message that was taken is in that group's order for good; it was numbered once,
    however often it had to be repeated.
    """

    def __init__(self, settings: SenderSettings | None = None) -> None:
        self._settings = settings or SenderSettings()
        self._lines: dict[str, SendingLine] = {}
        self._closed = False
        self._loop = LoopThread("lockstep-sender")

    def send(self, address: str, message: bytes, *, deadline_s: float) -> Future[int]:
        """Send a message and return at once; the result is the number that it got in that group.

        The future fails with `Refused`: by the name of a bound that it exceeds, here or there; SECRET
        or VERSION where the other side will never take it; LATE where it was not taken within
        `deadline_s`, which does not say that it never will be, since its last repetition may be under
        way; and CLOSED. Its callbacks are called on the sender's thread, and must not close the sender.
        It cannot be cancelled.

        Raises `ConfigError` for an address that makes no sense, or that needs a secret.
        """
        host, _ = split_address(address)
        require_secret(host, self._settings.secret)
        if not 0 < deadline_s <= DEADLINE_S_MAX:
            raise UsageError(
                f"deadline_s is {deadline_s}, must be more than 0 and at most {DEADLINE_S_MAX:g}"
            )
        outcome = Future[int]()
        # Whoever waits cannot take back what the other group may have by now.
        outcome.set_running_or_notify_cancel()
        letter = Letter(message, outcome, deadline_s)
        if len(message) > self._settings.message_bytes:
            letter.refuse(
                Refusal.TOO_LARGE,
                f"a message of {len(message)} bytes, must be at most {self._settings.message_bytes}",
            )
        elif not self._loop.call(self._post, address, letter):
            letter.refuse(Refusal.CLOSED, "the sender is closed")
        return outcome

    def close(self) -> None:
        """Let what is not taken yet fail as CLOSED, and end all connections. Idempotent."""
        ended = Future[None]()
        if self._loop.call(self._end, partial(ended.set_result, None)):
            ended.result()
        self._loop.close()

    def _post(self, address: str, letter: Letter) -> None:
        if self._closed:
            letter.refuse(Refusal.CLOSED, "the sender is closed")
            return
        line = self._lines.get(address)
        if line is None:
            if len(self._lines) >= self._settings.addresses:
                letter.refuse(
                    Refusal.FULL,
                    f"messages are under way to {len(self._lines)} addresses, and to no more at a time",
                )
                return
            line = self._lines[address] = SendingLine(
                address,
                secret=self._settings.secret,
                waiting_max=self._settings.messages_waiting,
                idle_s=self._settings.idle_s,
                ended=partial(self._lines.pop, address, None),
            )
        line.post(letter)

    def _end(self, done: Callable[[], object]) -> None:
        self._closed = True
        for line in list(self._lines.values()):
            line.end(Refused(Refusal.CLOSED, "the sender was closed before the message was taken"))
        done()
