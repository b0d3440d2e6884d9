"""The common part of the transports that share memory on a host."""

from ...errors import GroupError, PeerLost
from ..collective import Collective, CommonStore, Transport, Vector
from ..fold import fold
from .cells import CellSpan
from .home_process import HomeProcess
from .host_group import HostGroup


class _SharedRound:
    def __init__(
        self, collective: "SharingCollective", host: HostGroup, span: CellSpan, number: int
    ) -> None:
        self._collective = collective
        self._host = host
        self._span = span
        self._number = number

    def wait(self, timeout_s: float) -> Vector:
        """See `PendingRound`."""
        return self._collective.finish(self._number, timeout_s)

    def came_back(self, timeout_s: float) -> bool:
        """Wait for a while; say whether `wait` would return, or raise for good, at once."""
        try:
            return self._collective.has_left or self._host.came_back(
                self._number, self._span, timeout_s
            )
        except (LookupError, ValueError):
            if self._collective.has_left:
                return True
            raise


class SharingCollective:
    """Rounds that a rank writes to the memory of its host, and reads there; see `Collective`.

    A handler of a signal may close it whatever it interrupts. In a process that was forked from the
    rank's, rounds and gatherings raise `UsageError`, and `close` does nothing.
    """

    def __init__(
        self,
        group: Collective,
        host: HostGroup,
        transport: Transport,
        span: CellSpan,
        patience_s: float,
    ) -> None:
        """A round folds the lanes in `span`. `patience_s` is handed to `HostGroup.wait`."""
        self.rank = group.rank
        self.world_size = group.world_size
        self.transport: str = transport.value
        self.launches = 0
        self._group = group
        self._home = HomeProcess()
        self._host: HostGroup | None = host
        self._span = span
        self._patience_s = patience_s
        self._broken_by: GroupError | None = None

    def launch(self, lanes: Vector) -> _SharedRound:
        """See `Collective`."""
        host = self._joined()
        # Counted first: what others may have read must not be written a second time.
        self.launches += 1
        try:
            host.write(self.launches, lanes)
        except (LookupError, ValueError):
            if self._host is None:
                raise _left() from None
            raise
        return _SharedRound(self, host, self._span, self.launches)

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See `Collective`."""
        self._joined()
        try:
            return self._group.gather(payload, timeout_s)
        except GroupError as error:
            self._broken_by = error
            raise

    def common_store(self, name: str) -> CommonStore:
        """See `Collective`."""
        return self._group.common_store(name)

    def finish(self, number: int, timeout_s: float) -> Vector:
        """Wait for a round that was launched; if it fails, so does every later call."""
        host = self._joined()
        try:
            return fold(host.wait(number, self._span, timeout_s, self._patience_s))
        except GroupError as error:
            self._broken_by = error
            raise
        except (LookupError, ValueError, OSError):
            if self._host is None:
                raise _left() from None
            raise

    def close(self) -> None:
        """See `Collective`."""
        if not self._home.is_here:
            return
        host = self._host
        try:
            if host is not None:
                self._leave(host)
                self._host = None
                host.close()
        finally:
            self._group.close()

    @property
    def has_left(self) -> bool:
        """Whether this rank was closed, or is another process's."""
        return self._host is None or not self._home.is_here

    def leave(self, host: HostGroup) -> None:
        """Let every round that this rank has not launched end, for the others."""
        host.leave(self.launches)

    def _leave(self, host: HostGroup) -> None:
        try:
            self.leave(host)
        except (LookupError, ValueError, OSError):
            # A handler has closed it meanwhile, and so has this rank left.
            if self._host is not None:
                raise

    def _joined(self) -> HostGroup:
        self._home.require_here()
        if self._broken_by is not None:
            # The one error is raised each time, and would keep all that it has passed through.
            raise self._broken_by.with_traceback(None)
        host = self._host
        if host is None:
            raise _left()
        return host


def _left() -> PeerLost:
    return PeerLost("this rank has left the group")
