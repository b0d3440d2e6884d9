"""Orders: requests from the replica to this rank's executor.

Orders are immutable and refer to pages by slot number in a named pool. The pages named in an order
belong to the order's operation until a verdict says that every rank is done with them. So the executor
may access them at any time without a lock. The executor reports `Progress` (`coordinator.ballot`) of
several operations in any sequence.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

from ...coordinator.codec import Record

KV_POOL = "kv"
"""Name of the full-attention pool, which every model has."""


class Direction(StrEnum):
    """Direction of a copy between device and host."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


class ObjectTransfer(Record, frozen=True):
    """Objects of one pool, each with the host page that it is read into or written from.

    `keys` are page keys (`replica.page_keys`), in prefix order. The object with key `keys[i]` is read
    into or written from the page `pages[i]`.
    """

    pool: str
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    stored: bool = False
    """For a write: whether the store had the objects recently. If true, the executor writes only the
    objects that the store no longer has."""


class CopyTransfer(Record, frozen=True):
    """Pages of one pool to copy between device and host.

    The page `sources[i]` is copied to the page `destinations[i]`.
    """

    pool: str
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    sealed: bool = False
    """Whether checksums protect the copied pages. Used for pages of a retracted request, because no
    page key verifies them. A copy to the host records a checksum of each page. A copy to the device
    fails unless each page matches."""


class Need(Record, frozen=True):
    """The objects of one pool that may be needed to restore a prefix up to some length.

    Positions count pages from the start of the prefix. `keys[i]` is the key of the page at position
    `first + i`. A state's object has the key of the page that ends at the state's position. An empty
    key means that the object must not be looked up because an earlier read failed.
    """

    pool: str
    first: int
    keys: tuple[bytes, ...]
    span: int | None = None
    """Number of positions, counted back from the prefix's end, whose objects are needed to restore the
    prefix. None means all positions from `first` on."""
    on_host: frozenset[int] = frozenset()
    """Positions whose pages are in host memory already and need no object."""

    def keys_at(self, positions: Sequence[int]) -> tuple[bytes, ...]:
        """Return the page keys at the given positions, in the same order."""
        if isinstance(positions, range) and positions.step == 1:
            return self.keys[positions.start - self.first : positions.stop - self.first]
        return tuple([self.keys[position - self.first] for position in positions])


class LookUp(Record, frozen=True):
    """Look up which prefix lengths the store can restore.

    Lengths are numbers of pages. The executor looks up the lengths after `floor`, up to the last
    position of full attention (`needs[0]`). `executor.restorable` defines which lengths are restorable.
    The executor reports `Answered`, or `Expired` after `timeout_s`.
    """

    operation: int
    floor: int
    needs: tuple[Need, ...]
    timeout_s: float
    source: str = ""
    """The URI of another group whose host memory is queried instead of the store; empty for the store.
    """


class Fetch(Record, frozen=True):
    """Read objects into host pages.

    The pages of all transfers, in the order of the transfers, form one sequence. The executor reports:
    - `Landed` with the number of pages, from the start of the sequence, that hold verified
      bytes without a gap. Reported each time the number grows. Once the number includes all
      pages, the objects of every pool are complete.
    - `Capped` once a page cannot be read on this rank (missing, corrupt, failed).
    - `Expired` once `timeout_s` has passed.

    The order is finished when every page has landed, or when `Cancel` stops the order's operation.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]
    timeout_s: float
    source: str = ""
    """The URI of another group whose host memory the objects are read from; empty for the store. The
    other group must serve the pages (`Serve`)."""


class Serve(Record, frozen=True):
    """Let ranks of other groups read these host pages until the operation is cancelled by `Cancel`.

    Several orders of one operation add pages to those already served. The bytes of served pages do not
    change. The executor reports nothing before `Cancel`.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]


class Put(Record, frozen=True):
    """Write host pages to the store, each as an object.

    When the store chooses objects to evict, a write counts as a use of the object. The executor reports
    `Ended`, which is not ok if the write outlasts `timeout_s`.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]
    timeout_s: float
    after: bytes = b""
    """The key of the full-attention page that precedes the first of these objects in the prefix; empty
    at the start of a prefix. A store should evict these objects before it evicts that page."""
    distance: int = 0
    """Number of pages from the page with key `after` to the page of the first object. 1 means that the
    first object follows directly. 0 means that the first object is at the start of a prefix."""


class CopyToHost(Record, frozen=True):
    """Copy device pages to host pages (backup). The executor reports `Ended`.

    If the engine owns the device pages, the copy starts when the engine lets copies to the host begin,
    and `timeout_s` counts from then.
    """

    direction: ClassVar = Direction.TO_HOST
    operation: int
    transfers: tuple[CopyTransfer, ...]
    timeout_s: float


class CopyToDevice(Record, frozen=True):
    """Copy host pages to device pages (load back). The executor reports `Ended`.

    If the engine owns the device pages, the copy starts when the engine lets copies to the device
    begin, and `timeout_s` counts from then.
    """

    direction: ClassVar = Direction.TO_DEVICE
    operation: int
    transfers: tuple[CopyTransfer, ...]
    timeout_s: float


class Fork(Record, frozen=True):
    """Copy one device page to another, before any later work of the engine.

    The copy is ordered with the engine's own work (on CUDA: on the current stream), and every later
    order sees its result. The copy belongs to no operation. The executor reports nothing, because the
    copy fails only if the device fails.
    """

    pool: str
    source: int
    destination: int


class Fence(Record, frozen=True):
    """Wait until the given copies no longer touch device pages, so that the engine may overwrite them.

    For a copy that is still running after `timeout_s` the executor reports `Ended`, not ok, even if the
    copy succeeds later. For a copy that has not started the executor reports `Ended`, not ok, at once,
    and never starts the copy.
    """

    operations: tuple[int, ...] | None
    """Ids of the operations whose copies to wait for; None for all copies of this rank."""
    timeout_s: float


class Cancel(Record, frozen=True):
    """Stop the operation's I/O. Reports `Quiesced` once no I/O touches the operation's pages any more.

    If I/O is still running after `timeout_s`, the executor reports `QuiesceExpired`, and `Quiesced`
    later if the I/O finishes. An operation without I/O in flight is quiesced at once. A copy that has
    not started is dropped: the executor reports `Ended`, not ok, and `Quiesced` at once.
    """

    operation: int
    timeout_s: float


class AttachStore(Record, frozen=True):
    """Attach the store that was staged for a proposal. All later storage orders use this store.

    The store is open on every rank. The previous store, if any, was detached before.
    """

    proposal: int
    """The digest of the proposal whose store to attach."""


class DetachStore(Record, frozen=True):
    """Detach the store and close it in the background.

    At this order, only quarantined operations have I/O in flight on the store. The executor reports
    `Quiesced` for each of them if its I/O finishes. Later storage orders are refused.
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
