"""Executes control requests on one rank; rank 0 also passes the results to the clients."""

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
    """Executes control requests on one rank. Create one per rank before the cache's first step.

    Owned by the engine's thread; only `waited_for` may be called from any thread.
    """

    def __init__(self, cache: RankCache) -> None:
        """Register this object as the handler of the control requests that `cache` receives."""
        self.cache = cache
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Future[Answer]] = {}
        """The result futures of the control requests whose clients wait on this rank, by ticket (a
        random id)."""
        cache.set_control_handler(self._carry_out)

    def waited_for(self, request: AnyRequest) -> "tuple[bytes, Future[Answer]]":
        """Register a control request whose client waits; return (encoded request, result's future).

        For any thread.
        """
        ticket, answer = secrets.token_bytes(8), Future[Answer]()
        with self._lock:
            self._waiting[ticket] = answer
        answer.add_done_callback(lambda _: self._forget(ticket))
        return REQUESTS.encode((ticket, request)), answer

    def close(self) -> None:
        """Send a `LockstepError` to each client whose control request was not executed."""
        with self._lock:
            left = list(self._waiting.values())
        for answer in left:
            # Skip a running future: its control request is being executed, and the execution sets the
            # future's result.
            if not answer.running() and answer.set_running_or_notify_cancel():
                answer.set_exception(
                    LockstepError("the group ended before the request was executed")
                )

    def _forget(self, ticket: bytes) -> None:
        with self._lock:
            self._waiting.pop(ticket, None)

    def _carry_out(self, content: bytes) -> None:
        ticket, request = REQUESTS.decode(content)
        log.info("control request: %s", _shown(request))
        waiting = self._begun(ticket)
        try:
            became = request.carry_out(self.cache)
        except (UsageError, ConfigError) as error:
            # Log the refusal in addition to sending it, because the client may have timed out while its
            # control request was queued.
            log.warning("%s is refused: %s", request.ask, error)
            waiting.set_exception(error)
            return
        except BaseException as error:
            why = f"the group ended before the request was executed: {error!r:.500}"
            waiting.set_exception(LockstepError(why))
            raise
        if isinstance(became, Future):
            became.add_done_callback(lambda ended: _pass_on(ended, waiting))
        else:
            waiting.set_result(became)

    def _begun(self, ticket: bytes) -> "Future[Answer]":
        """Return the future for a control request's result; a new one if no client waits for it."""
        with self._lock:
            waiting = self._waiting.get(ticket)
        # Execute the control request even if no client waits for its result, because the other ranks
        # execute it, too.
        begun = waiting is not None and waiting.set_running_or_notify_cancel()
        return waiting if waiting is not None and begun else Future()


def _pass_on(ended: "Future[None]", waiting: "Future[Answer]") -> None:
    error = ended.exception()
    if error is None:
        waiting.set_result({})
    else:
        waiting.set_exception(error)


def _shown(request: AnyRequest) -> str:
    """Format a control request for the log. Omits passwords and token lists, and cuts long values."""
    shown = msgspec.structs.asdict(request)
    if "tokens" in shown:
        shown["tokens"] = f"{len(shown['tokens'])} tokens"
    if "store" in shown:
        shown["store"] = without_secrets(str(shown["store"]))
    return " ".join([request.ask, *(f"{name}={value!r:.200}" for name, value in shown.items())])
