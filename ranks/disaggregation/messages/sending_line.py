"""The messages to one address that are not taken yet, and the connection that they go over."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ....storage_backends.host_port import split_address
from ..refusal import Refusal, Refused
from .frames import Connection, Kind, refused_as
from .numbering import SENDER_BYTES, SEQUENCE_SPAN

_PAUSES_S = (0.02, 0.1, 0.5, 1.0)
"""How long to wait before the next attempt: so long the first time, then the next, then the last."""
_CONNECTS_S = 10.0
_ANSWERS_S = 10.0
"""How long nothing may be heard of what was sent before the connection counts as lost."""
_FINAL = (Refusal.SECRET, Refusal.VERSION, Refusal.MALFORMED)
"""Refusals of a connection that another attempt would meet again."""
_ANSWER_BYTES_MAX = 1 << 10


@dataclass(slots=True, eq=False)
class Letter:
    """A message that was not taken yet, and whoever wants to know what becomes of it."""

    content: bytes
    outcome: Future[int]
    deadline_s: float
    timer: asyncio.TimerHandle | None = None
    attempts: int = 0

    def refuse(self, refusal: Refusal, sentence: str) -> None:
        """Say that it is not taken."""
        self.refused(Refused(refusal, sentence))

    def refused(self, refused: Refused) -> None:
        """Say that it is not taken, and why."""
        if not self.outcome.done():
            self.outcome.set_exception(refused)


class SendingLine:
    """Sends letters to one address until each is taken, refused, or late. Owned by one event loop.

    It is one sender to whoever takes them, known by random bytes. It ends when there was nothing to
    send for a while, and what is sent later is another sender's.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        waiting_max: int,
        idle_s: float,
        ended: Callable[[], object],
    ) -> None:
        """`ended` is called when the line has ended; nothing may be posted to it any more."""
        self._address = address
        self._secret = secret
        self._waiting_max = waiting_max
        self._idle_s = idle_s
        self._ended = ended
        self._name = secrets.token_bytes(SENDER_BYTES)
        self._last = 0
        self._letters: dict[int, Letter] = {}
        """Those that are not taken yet, by sequence number."""
        self._due: set[int] = set()
        """Those that are to be sent over the connection that there is."""
        self._wake = asyncio.Event()
        self._bytes_max: int | None = None
        """How many bytes a message may have over there, once that is known."""
        self._trouble = "it was not reached"
        self._running = asyncio.create_task(self._run())

    def post(self, letter: Letter) -> None:
        """Send a letter as soon as those before it are on their way."""
        oldest = min(self._letters, default=self._last + 1)
        if len(self._letters) >= self._waiting_max or self._last + 2 - oldest > SEQUENCE_SPAN:
            letter.refuse(
                Refusal.FULL,
                f"{len(self._letters)} messages to {self._address} wait, which is as many as may wait",
            )
            return
        self._last += 1
        self._letters[self._last] = letter
        loop = asyncio.get_running_loop()
        letter.timer = loop.call_later(letter.deadline_s, self._late, self._last)
        self._again(self._last)

    def end(self, why: Refused) -> None:
        """Let every letter fail, and end."""
        for sequence in list(self._letters):
            self._take_out(sequence).refused(why)
        self._running.cancel()
        self._ended()

    def _again(self, sequence: int) -> None:
        self._due.add(sequence)
        self._wake.set()

    def _late(self, sequence: int) -> None:
        letter = self._take_out(sequence)
        letter.refuse(
            Refusal.LATE,
            f"a message to {self._address} was not taken within {letter.deadline_s:g} s:"
            f" {self._trouble}",
        )

    def _take_out(self, sequence: int) -> Letter:
        letter = self._letters.pop(sequence)
        if letter.timer is not None:
            letter.timer.cancel()
        return letter

    async def _run(self) -> None:
        failures = 0
        while True:
            taken_before = self._last - len(self._letters)
            try:
                await self._converse()
            except Refused as refused:
                self._trouble = str(refused)
                if refused.refusal in _FINAL:
                    self.end(refused)
                    return
            except (OSError, EOFError, TimeoutError) as error:
                self._trouble = str(error) or type(error).__name__
            if not self._letters:
                self._ended()
                return
            failures = 0 if self._last - len(self._letters) > taken_before else failures + 1
            await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])

    async def _converse(self) -> None:
        """Send all that is not taken over a new connection, until there was nothing for a while."""
        host, port = split_address(self._address)
        async with asyncio.timeout(_CONNECTS_S):
            connection = await Connection.to(
                host, port, bytes_max=_ANSWER_BYTES_MAX, secret=self._secret
            )
        try:
            async with asyncio.timeout(_CONNECTS_S):
                _, (self._bytes_max,) = await connection.receive(Kind.BOUND)
            self._due = set(self._letters)
            hearing = asyncio.create_task(self._hear(connection))
            telling = asyncio.create_task(self._tell(connection))
            both = hearing, telling
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                outcomes = await asyncio.gather(*both, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
        finally:
            connection.abort()

    async def _tell(self, connection: Connection) -> None:
        """Send what is due; returns when there was nothing for a while."""
        while True:
            self._wake.clear()
            for sequence in sorted(self._due):
                self._due.discard(sequence)
                letter = self._letters.get(sequence)
                if letter is not None and self._fits(sequence, letter):
                    await connection.send(Kind.SEND, self._name, sequence, letter.content)
            if not self._due:
                try:
                    async with asyncio.timeout(self._idle_s):
                        await self._wake.wait()
                except TimeoutError:
                    if not self._letters:
                        return

    def _fits(self, sequence: int, letter: Letter) -> bool:
        """Say whether a message is not too large for whoever is to take it, and refuse it if it is."""
        if self._bytes_max is None or len(letter.content) <= self._bytes_max:
            return True
        self._take_out(sequence).refuse(
            Refusal.TOO_LARGE,
            f"a message of {len(letter.content)} bytes, must be at most {self._bytes_max} at"
            f" {self._address}",
        )
        return False

    async def _hear(self, connection: Connection) -> None:
        """Note what is taken and what is refused."""
        while True:
            kind, fields = await self._next_answer(connection)
            letter = self._letters.get(fields[0])
            if letter is None:
                continue
            if kind is Kind.TAKEN:
                self._take_out(fields[0])
                letter.outcome.set_result(fields[1])
                continue
            refused = refused_as(fields[1], fields[2])
            if refused.refusal is not Refusal.FULL:
                self._take_out(fields[0]).refused(refused)
                continue
            # There may be room again before its time is up.
            self._trouble = str(refused)
            pause_s = _PAUSES_S[min(letter.attempts, len(_PAUSES_S) - 1)]
            letter.attempts += 1
            asyncio.get_running_loop().call_later(pause_s, self._again, fields[0])

    async def _next_answer(self, connection: Connection) -> tuple[Kind, Any]:
        """Return what is said next; raises `TimeoutError` where something is awaited in vain."""
        receiving = asyncio.ensure_future(connection.receive(Kind.TAKEN, Kind.REFUSED))
        try:
            while True:
                awaited = bool(self._letters)
                done, _ = await asyncio.wait([receiving], timeout=_ANSWERS_S)
                if done:
                    return receiving.result()
                if awaited and self._letters:
                    raise TimeoutError(f"{self._address} has not answered within {_ANSWERS_S:g} s")
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
