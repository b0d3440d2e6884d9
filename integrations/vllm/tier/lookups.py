"""Which chunks are in the store: asked once for each, in one batch a step, and never waited for.

An answer holds for the requests that asked, until the last of them is over. A chunk that was read and
was not there, or was damaged, is remembered as missing for a while and for all requests, so that none
is sent to read it again: neither the same one for ever (vllm#49176), nor one after the other.

Used from the scheduler's thread alone.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

MISSING_S: Final = 30.0
"""So long a chunk that could not be read is not looked for. Another engine may write it again."""
MISSING_MAX: Final = 1 << 16
LATE_S: Final = 1.0
"""A lookup that is so much later than its deadline does not keep the contract (S2), and is left."""
SILENT_S: Final = 30.0
"""So long a store that did not even keep the deadline is not asked: each request would wait for it."""

Ask = Callable[[Sequence[bytes], float], "Future[list[bool]]"]
"""Begins to ask the store for some keys, by a deadline. Raises what keeps it from doing so."""


@dataclass(slots=True)
class _Asked:
    """One chunk, and who wants to know of it."""

    requests: set[str]
    answer: bool | None = None
    is_asked_for: bool = False


@dataclass(slots=True)
class _Batch:
    """What was asked in one step."""

    keys: list[bytes]
    by: float
    answer: "Future[list[bool]] | None"
    chunks: list[_Asked] = field(default_factory=list[_Asked])


class Lookups:
    """Answers for chunks, as far as they are known."""

    def __init__(
        self,
        ask: Ask,
        timeout_s: float,
        *,
        trouble: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`trouble` is told of lookups that came to nothing."""
        self._ask = ask
        self._timeout_s = timeout_s
        self._trouble = trouble
        self._clock = clock
        self._chunks: dict[bytes, _Asked] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []
        self._waiting: list[_Batch] = []
        self._missing: OrderedDict[bytes, float] = OrderedDict()
        self._silent_until = 0.0

    def find(self, key: bytes, request: str) -> bool | None:
        """Say whether the store has a chunk; None while that is not known."""
        self._settle()
        asked = self._chunks.get(key)
        if asked is None:
            asked = self._chunks[key] = _Asked(set())
            if self._is_missing(key):
                asked.answer = False
            else:
                self._new.append(key)
        asked.requests.add(request)
        self._of_request.setdefault(request, set()).add(key)
        return asked.answer

    def flush(self) -> None:
        """Ask for what was new in this step."""
        self._settle()
        # The last request that wanted one may be over, and the next one may have asked anew.
        new = {key: self._chunks[key] for key in self._new if key in self._chunks}
        self._new.clear()
        if not new:
            return
        keys = list(new)
        by = self._clock() + self._timeout_s
        batch = _Batch(keys, by, None, list(new.values()))
        for asked in batch.chunks:
            asked.is_asked_for = True
        if self._clock() < self._silent_until:
            self._answer(batch, [False] * len(keys), None)
            return
        try:
            batch.answer = self._ask(keys, by)
        except Exception as error:  # noqa: BLE001 - what cannot be told is missing.
            self._answer(batch, [False] * len(keys), repr(error))
            return
        self._waiting.append(batch)

    def lost(self, keys: Iterable[bytes]) -> None:
        """Note that chunks could not be read, whatever was said of them."""
        until = self._clock() + MISSING_S
        for key in keys:
            asked = self._chunks.get(key)
            if asked is not None:
                asked.answer = False
            self._missing[key] = until
            self._missing.move_to_end(key)
        while len(self._missing) > MISSING_MAX:
            self._missing.popitem(last=False)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that the store has chunks now, whatever was said of them."""
        for key in keys:
            self._missing.pop(key, None)
            asked = self._chunks.get(key)
            if asked is not None:
                asked.answer = True

    def finished(self, request: str) -> None:
        """Forget what only this request has asked for; what is still asked for serves the next one."""
        for key in self._of_request.pop(request, ()):
            asked = self._chunks[key]
            asked.requests.discard(request)
            if not asked.requests and not asked.is_asked_for:
                del self._chunks[key]

    def __len__(self) -> int:
        """How many chunks are known or asked for."""
        return len(self._chunks)

    def _is_missing(self, key: bytes) -> bool:
        until = self._missing.get(key)
        return until is not None and self._clock() < until

    def _settle(self) -> None:
        """Take the answers that have come, and give up what has no more time."""
        if not self._waiting:
            return
        still: list[_Batch] = []
        for batch in self._waiting:
            assert batch.answer is not None
            none = [False] * len(batch.keys)
            if batch.answer.cancelled():
                self._answer(batch, none, "the store is closed")
            elif batch.answer.done():
                error = batch.answer.exception()
                if error is not None:
                    self._answer(batch, none, repr(error))
                else:
                    self._answer(batch, batch.answer.result(), None)
            elif self._clock() >= batch.by + LATE_S:
                batch.answer.cancel()
                self._silent_until = self._clock() + SILENT_S
                self._answer(batch, none, "no answer in time")
            else:
                still.append(batch)
        self._waiting = still

    def _answer(self, batch: _Batch, found: Sequence[bool], trouble: str | None) -> None:
        if trouble is not None:
            self._trouble(trouble)
        for key, asked, is_there in zip(batch.keys, batch.chunks, found, strict=True):
            asked.is_asked_for = False
            if asked.answer is None:
                asked.answer = is_there
            if not asked.requests and self._chunks.get(key) is asked:
                del self._chunks[key]
