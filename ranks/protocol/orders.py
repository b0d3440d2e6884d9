"""Orders: requests from the replica to this rank's executor.

Orders are immutable and refer to pages by slot number in a named pool. Pages named in an order belong
to its operation until a verdict says that every rank is done with them. So the executor may access them
at any time without a lock. The executor reports `Progress` (`coordinator.ballot`) in any order.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

from ...coordinator.codec import Record

KV_POOL = "kv"
"""The pool of full-attention pages, which every model has."""


class Direction(StrEnum):
    """Direction of a copy between device and host."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


class ObjectTransfer(Record, frozen=True):
    """Objects of one pool, and the host pages that each is read into or written from, index by index.

    `keys` are page keys (`replica.page_keys`), in prefix order.
    """

    pool: str
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    stored: bool = False
    """If true, the store had the objects recently, so only those that it has evicted are written."""


class CopyTransfer(Record, frozen=True):
    """Pages of one pool to copy between device and host, index by index."""

    pool: str
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    sealed: bool = False
    """To host: record a checksum of each page. To device: fail the copy unless each page matches its
    checksum. Used for pages of a retracted request, which no key verifies."""


class Need(Record, frozen=True):
    """The objects of one pool that may be needed to restore a prefix up to some length.

    Positions count pages from the start of the prefix. `keys` are the keys of the pages `first`, `first
    + 1` and so on. A state's object has the key of the page that ends at the state's position. An empty
    key means that the object must not be looked up because an earlier read failed.
    """

    pool: str
    first: int
    keys: tuple[bytes, ...]
    span: int | None = None
    """How many positions before its end a length needs; None means all positions from `first` on."""
    on_host: frozenset[int] = frozenset()
    """Positions whose pages are already in host memory."""

    def keys_at(self, positions: Sequence[int]) -> tuple[bytes, ...]:
        """Return the page keys at these positions, in the same order."""
        if isinstance(positions, range) and positions.step == 1:
            return self.keys[positions.start - self.first : positions.stop - self.first]
        return tuple([self.keys[position - self.first] for position in positions])


class LookUp(Record, frozen=True):
    """Look up which lengths the store can restore. Reports `Answered`, or `Expired` after `timeout_s`.

    Lengths count from the position `floor` and reach at most to the end of the first need, which is
    full attention's. `executor.restorable` defines which lengths are restorable.
    """

    operation: int
    floor: int
    needs: tuple[Need, ...]
    timeout_s: float
    source: str = ""
    """The URI of another group to query instead of the store (see `Fetch`)."""


class Fetch(Record, frozen=True):
    """Read objects into host pages.

    The pages of all transfers, in order of the transfers, form one sequence. Reports:
    - `Landed` with the number of leading pages that hold verified bytes, as it grows.
      A complete count is complete in every pool.
    - `Capped` once a page cannot be read on this rank (missing, corrupt, failed).
    - `Expired` once `timeout_s` has passed.

    The order is finished when every page has landed or its operation is cancelled by `Cancel`.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]
    timeout_s: float
    source: str = ""
    """The URI of another group that serves the objects from its host memory (`Serve`); empty for the
    store."""


class Serve(Record, frozen=True):
    """Let ranks of other groups read these host pages until the operation is cancelled by `Cancel`.

    Several orders of one operation add pages to those already served. The pages' content does not
    change. Reports no progress until `Cancel`.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]


class Put(Record, frozen=True):
    """Write host pages to the store, which also counts as a use of the objects. Reports `Ended`.

    `Ended` is not ok if `timeout_s` has passed.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]
    timeout_s: float
    after: bytes = b""
    """The key of the full-attention page that the first object continues; empty at the start of a
    prefix. The store should keep that page as long as these objects."""
    distance: int = 0
    """Distance in pages from `after` to the first object; 0 at the start of a prefix."""


class CopyToHost(Record, frozen=True):
    """Copy device pages to host pages (backup). Reports `Ended`.

    With engine-owned device pages, the copy starts when the executor is told to begin copies in this
    `direction`, and `timeout_s` counts from then.
    """

    direction: ClassVar = Direction.TO_HOST
    operation: int
    transfers: tuple[CopyTransfer, ...]
    timeout_s: float


class CopyToDevice(Record, frozen=True):
    """Copy host pages to device pages (load back). Reports `Ended`; starts as `CopyToHost` does."""

    direction: ClassVar = Direction.TO_DEVICE
    operation: int
    transfers: tuple[CopyTransfer, ...]
    timeout_s: float


class Fork(Record, frozen=True):
    """Copy one device page to another, before any later work of the engine.

    The copy is ordered with the engine's own work (on CUDA: on the current stream), and every later
    order sees its result. Belongs to no operation and reports nothing, because the copy fails only if
    the device does.
    """

    pool: str
    source: int
    destination: int


class Fence(Record, frozen=True):
    """Wait until these copies no longer touch device pages, so that the engine may overwrite the pages.

    A copy still running after `timeout_s` reports `Ended`, not ok, whatever its real outcome. A copy
    that has not started reports the same at once and never starts.
    """

    operations: tuple[int, ...] | None
    """The operations to wait for; None for all copies of this rank."""
    timeout_s: float


class Cancel(Record, frozen=True):
    """Stop the operation's I/O. Reports `Quiesced` once no I/O touches the operation's pages any more.

    If I/O is still running after `timeout_s`, reports `QuiesceExpired`, and `Quiesced` later if the I/O
    finishes. An operation without I/O in flight is quiesced at once. A copy that has not started is
    dropped, reports `Ended`, not ok, and is quiesced at once.
    """

    operation: int
    timeout_s: float


class AttachStore(Record, frozen=True):
    """Use the store that was staged for a proposal for all storage orders from now on.

    The store is open on every rank. Any previous store was detached before.
    """

    proposal: int
    """The digest of the proposal."""


class DetachStore(Record, frozen=True):
    """Detach the store and close it in the background.

    Only quarantined operations still have I/O in flight, and report `Quiesced` if that I/O finishes.
    Later storage orders are refused.
    """


Order = (
    LookUp
    | Fetch
    | Put
    | Serve
    | CopyToHost
    | CopyToDevice
    | Fork
    | Fence
    | Cancel
    | AttachStore
    | DetachStore
)
