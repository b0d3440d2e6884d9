"""One rank's part in what is asked: to carry it out, and on rank 0 to tell what became of it."""

import logging
import secrets
import threading
from concurrent.futures import Future

import msgspec

from ....errors import ConfigError, LockstepError, UsageError
from ....storage_backends.uri import without_secrets
from ..member.rank_cache import RankCache
from .requests import REQUESTS, Answer, AnyRequest

log = logging.getLogger("lockstep")


class GroupControl:
    """Carries out requests on one rank. To be made on every rank before the cache's first step.

    It belongs to the engine's thread, but for `waited_for`.
    """

    def __init__(self, cache: RankCache) -> None:
        """`cache` must take requests, as those of all ranks do."""
        self.cache = cache
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Future[Answer]] = {}
        """Where the answers to requests are waited for that came by way of this rank."""
        cache.obey(self._carry_out)

    def waited_for(self, request: AnyRequest) -> "tuple[bytes, Future[Answer]]":
        """Return a request as bytes, and where its answer will be. For any thread."""
        ticket, answer = secrets.token_bytes(8), Future[Answer]()
        with self._lock:
            self._waiting[ticket] = answer
        answer.add_done_callback(lambda _: self._forget(ticket))
        return REQUESTS.encode((ticket, request)), answer

    def close(self) -> None:
        """Tell whoever still waits that no answer will come."""
        with self._lock:
            left = list(self._waiting.values())
        for answer in left:
            # One that has begun by then is told by the cache itself.
            if not answer.running() and answer.set_running_or_notify_cancel():
                answer.set_exception(LockstepError("the group has ended before it was done"))

    def _forget(self, ticket: bytes) -> None:
        with self._lock:
            self._waiting.pop(ticket, None)

    def _carry_out(self, content: bytes) -> None:
        ticket, request = REQUESTS.decode(content)
        log.info("an operator asks: %s", _shown(request))
        waiting = self._begun(ticket)
        try:
            became = request.carry_out(self.cache)
        except (UsageError, ConfigError) as error:
            # The client of a queued request has gone, so only the log can show the refusal.
            log.warning("%s is refused: %s", request.ask, error)
            waiting.set_exception(error)
            return
        except BaseException as error:
            why = f"the group has ended before it was done: {error!r:.500}"
            waiting.set_exception(LockstepError(why))
            raise
        if isinstance(became, Future):
            became.add_done_callback(lambda ended: _pass_on(ended, waiting))
        else:
            waiting.set_result(became)

    def _begun(self, ticket: bytes) -> "Future[Answer]":
        """Return where a request's answer is to be told; where nobody waits for it, nowhere."""
        with self._lock:
            waiting = self._waiting.get(ticket)
        # Whoever asked may have gone; the others do it all the same, and so does this rank.
        begun = waiting is not None and waiting.set_running_or_notify_cancel()
        return waiting if waiting is not None and begun else Future()


def _pass_on(ended: "Future[None]", waiting: "Future[Answer]") -> None:
    error = ended.exception()
    if error is None:
        waiting.set_result({})
    else:
        waiting.set_exception(error)


def _shown(request: AnyRequest) -> str:
    """Return a request for the log: no passwords, not all tokens of a prompt, nothing long."""
    shown = msgspec.structs.asdict(request)
    if "tokens" in shown:
        shown["tokens"] = f"{len(shown['tokens'])} tokens"
    if "store" in shown:
        shown["store"] = without_secrets(str(shown["store"]))
    return " ".join([request.ask, *(f"{name}={value!r:.200}" for name, value in shown.items())])
