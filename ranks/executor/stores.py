"""The stores of one rank: the one in use, one that is staged, and those that are being closed.

A store that was let go of may still touch pages that are quarantined, so it is kept in sight until its
last call has returned. All but `stage` is called from the engine's thread.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...coordinator.proposal import Change, Proposal, Readiness
from ...errors import ConfigError, InternalError, UsageError
from ...storage_backends.base import StorageBackend
from ...storage_backends.records.shardings import Shardings
from ...storage_backends.wrappers.metrics import CallLog, Metrics, SeenCall
from ..protocol.timed_events import StoreCalled, Timeline
from .base import LateCalls
from .inflight_bytes import InflightBytes
from .late_calls import LateCallsLog
from .pools import HostPool
from .sources import Sources
from .storage_loop import OPERATION, StorageLoop, StorageReport
from .storage_transfers import RankObjects
from .writers import WriterShare

OPEN_TIMEOUT_S = 60.0
"""How long a store may take to open on this rank; `Timeouts.open_s` bounds it on all."""
CLOSING_MAX = 4
"""Stores that were let go of and still have calls running; each keeps a thread and its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """A store as one rank uses it."""

    kind: str
    """The URI's scheme with the wrappers before it, under which its calls are counted."""
    make_backend: Callable[[], StorageBackend]
    """Makes the backend, not open yet; called once. May take a while, and raise."""
    namespace: str
    """The hex digest that all object names begin with."""
    writer: WriterShare
    shardings: Shardings


Connect = Callable[[str], StoreAccess]
"""Says how this rank uses the store of a URI; asks nobody.

Raises `ConfigError` for a URI that makes no sense, as far as that shows without a stranger's package.
"""


class Stores:
    """Opens and closes the stores of one rank, and hands orders to the one in use."""

    def __init__(
        self,
        pools: Mapping[str, HostPool],
        report: Callable[[StorageReport], None],
        *,
        connect: Connect | None,
        connect_source: Connect | None = None,
        inflight_bytes: int,
        close_timeout_s: float,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline
        self._pools = pools
        self._report = report
        self._connect = connect
        self._connect_source = connect_source
        self._room = InflightBytes(inflight_bytes)
        self._late = LateCallsLog()
        self._calls: dict[str, CallLog] = {}
        """Logs of calls to all stores since the start, by kind of store."""
        self._close_timeout_s = close_timeout_s
        self._sources = Sources(self._loop_from, close_timeout_s)
        self._used: StorageLoop | None = None
        self._staged: dict[int, StorageLoop | str] = {}
        """The store of a staged proposal, or why there is none, by the proposal; at most one."""
        self._closing: list[StorageLoop] = []

    def open(self, access: StoreAccess) -> None:
        """Open a store and use it; raises what keeps it from opening."""
        loop = self._loop(access)
        try:
            loop.open(OPEN_TIMEOUT_S)
        except BaseException:
            self._let_go(loop)
            raise
        self._used = loop

    def is_moving(self) -> bool:
        """Say whether bytes are on their way from or to a store; any thread may ask."""
        return self._room.taken > 0

    def stage(self, proposal: Proposal) -> None:
        """Begin to open the store of a proposal; see `Executor`."""
        if proposal.change is Change.DETACH:
            return
        if self._connect is None:
            raise UsageError("no store can be attached to this executor")
        access = self._connect(proposal.store)
        refusal = self._refusal()
        if refusal is not None:
            self._staged[proposal.digest] = refusal
            return
        loop = self._loop(access)
        loop.start(OPEN_TIMEOUT_S)
        self._staged[proposal.digest] = loop

    def readiness(self, proposal: Proposal) -> Readiness | str:
        """Say how far the store of a staged proposal is, or why it cannot be used."""
        if proposal.change is Change.DETACH:
            return Readiness.READY
        staged = self._staged[proposal.digest]
        if isinstance(staged, str):
            return staged
        try:
            opened = staged.is_open()
        except ConfigError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - a strange backend must not end the rank.
            return f"{type(error).__name__}: {error}"
        return staged.trouble() or (Readiness.READY if opened else Readiness.STAGED)

    def unstage(self, proposal: Proposal) -> None:
        """Close the store of a proposal again."""
        staged = self._staged.pop(proposal.digest, None)
        if isinstance(staged, StorageLoop):
            self._let_go(staged)

    def attach(self, proposal: int) -> None:
        """Use the store that was staged."""
        staged = self._staged.pop(proposal, None)
        if not isinstance(staged, StorageLoop) or self._used is not None:
            raise InternalError("a store is attached that was not staged here, or beside another")
        self._used = staged

    def detach(self) -> None:
        """Close the store in use, in the background."""
        if self._used is not None:
            self._let_go(self._used)
            self._used = None

    def loop(self, source: str = "") -> StorageLoop | None:
        """Return what carries out orders for the store in use, or for a source; None without one."""
        return self._sources.loop(source) if source else self._used

    def trouble(self) -> str | None:
        """Say why the store in use has ended, or None."""
        return None if self._used is None else self._used.trouble()

    def late_calls(self) -> LateCalls:
        """Return the calls to all stores that ran out of their time."""
        return self._late.seen

    def calls(self) -> dict[str, Metrics]:
        """Return what was asked of all stores so far, by their kind."""
        return {kind: log.metrics() for kind, log in list(self._calls.items())}

    def stop(self) -> None:
        """Cancel everything, in every store; does not wait."""
        self._sources.stop()
        self.detach()
        for digest in list(self._staged):
            staged = self._staged.pop(digest)
            if isinstance(staged, StorageLoop):
                self._let_go(staged)

    def join(self, timeout_s: float) -> bool:
        """After `stop`: wait until nothing touches the pools; say whether that is so."""
        until = time.monotonic() + timeout_s
        ended = [loop.join(max(0.0, until - time.monotonic())) for loop in self._closing]
        return all(ended) and self._sources.join(max(0.0, until - time.monotonic()))

    def _loop_from(self, source: str) -> StorageLoop:
        if self._connect_source is None:
            raise ConfigError("this executor reads from no other group")
        return self._loop(self._connect_source(source))

    def _loop(self, access: StoreAccess) -> StorageLoop:
        objects = RankObjects(
            pools=self._pools,
            namespace=access.namespace,
            writer=access.writer,
            shardings=access.shardings,
        )
        log = self._calls.get(access.kind)
        if log is None:
            log = self._calls[access.kind] = CallLog(self._on_call(access.kind))
        return StorageLoop(
            access.make_backend,
            objects,
            self._report,
            room=self._room,
            late=self._late,
            calls=log,
        )

    def _on_call(self, kind: str) -> Callable[[SeenCall], None] | None:
        """Return what tells the timeline of calls to stores of a kind; None where there is none."""
        timeline = self._timeline
        if timeline is None:
            return None

        def tell(seen: SeenCall) -> None:
            call, pool, outcomes, nbytes, began_s, ended_s = seen
            operation = OPERATION.get()
            timeline(
                StoreCalled(kind, call.value, operation, pool, outcomes, nbytes, began_s, ended_s)
            )

        return tell

    def _refusal(self) -> str | None:
        """Say why stores that were let go of leave no room for another one, or None."""
        self._forget_closed()
        if len(self._closing) >= CLOSING_MAX:
            return (
                f"{CLOSING_MAX} stores that were let go of do not end their last calls; start the"
                " process again"
            )
        taken, most = self._room.taken, self._room.bytes_max
        if self._used is None and 2 * taken > most:
            return (
                f"calls of stores that were let go of hold {taken} of the {most} bytes that may be"
                " in flight (bounds.inflight_bytes); try again when they have returned, or start the"
                " process again"
            )
        return None

    def _let_go(self, loop: StorageLoop) -> None:
        self._forget_closed()
        loop.stop(self._close_timeout_s)
        self._closing.append(loop)

    def _forget_closed(self) -> None:
        self._closing = [loop for loop in self._closing if not loop.join(0.0)]
