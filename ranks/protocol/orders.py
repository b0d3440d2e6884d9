"""Orders: what the replica asks this rank's executor to do.

Orders are immutable and refer to pages by slot number in a named pool. The pages that an order names
belong to its operation until a verdict says that every rank is done with them, so the executor may
touch them at any time in between and needs no lock. The executor answers with `Progress`
(`coordinator.ballot`), in any order and at its own pace.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

from ...coordinator.codec import Record

KV_POOL = "kv"
"""The pool of full-attention pages, which every model has."""


class Direction(StrEnum):
    """Which way pages are copied between the tiers of a rank."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


class ObjectTransfer(Record, frozen=True):
    """Objects of one pool and the host pages that they fill or come from, index by index.

    `keys` are page keys (`replica.page_keys`), in prefix order.
    """

    pool: str
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    stored: bool = False
    """The store had the objects a while ago: only those that it has no more are to be written."""


class CopyTransfer(Record, frozen=True):
    """Pages of one pool to copy between the tiers of this rank, index by index."""

    pool: str
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    sealed: bool = False
    """To the host: remember a checksum of each page. To the device: the copy fails unless each page
    still has it. For bytes that nothing else checks, those of one request that is retracted."""


class Need(Record, frozen=True):
    """The objects that one pool must have so that a prefix can be restored up to some length.

    Positions count pages from the start of the prefix. `keys` are those of the pages `first`,
    `first + 1` and so on; an object of a pool of states lies under the key of the page that ends
    where the state does. A key that is empty stands for an object that is not to be asked for: it
    could not be read before.
    """

    pool: str
    first: int
    keys: tuple[bytes, ...]
    span: int | None = None
    """How many positions before its end a length needs; None stands for all from `first` on."""
    on_host: frozenset[int] = frozenset()
    """Positions that are in host memory already."""

    def keys_at(self, positions: Sequence[int]) -> tuple[bytes, ...]:
        """Return the keys of the pages at these positions, in their order."""
        if isinstance(positions, range) and positions.step == 1:
            return self.keys[positions.start - self.first : positions.stop - self.first]
        return tuple([self.keys[position - self.first] for position in positions])


class LookUp(Record, frozen=True):
    """Say which lengths the store can restore (`Answered`), or that time is up (`Expired`).

    Lengths are counted from the position `floor`, and go up to the end of the first need, which is
    that of full attention. `executor.restorable` says which they are.
    """

    operation: int
    floor: int
    needs: tuple[Need, ...]
    timeout_s: float
    source: str = ""
    """The URI of another group, which is asked and not the store; see `Fetch`."""


class Fetch(Record, frozen=True):
    """Read objects into host pages.

    The pages of all transfers, one transfer after the other, are one sequence. Reports `Landed` with
    the number of its leading pages that hold verified bytes, as it grows; `Capped` once some page
    cannot land here (missing, corrupt, failed); `Expired` once `timeout_s` has passed. So a count
    that is complete is complete in every pool. The operation is over when every page has landed or
    when a `Cancel` for it arrives.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]
    timeout_s: float
    source: str = ""
    """The URI of another group that serves the objects out of its host memory (`Serve`); empty for the
    store."""


class Serve(Record, frozen=True):
    """Let ranks of other groups read these host pages, from now on and until a `Cancel`.

    Orders of one operation add up: each brings pages that were not served by it before. The pages do
    not change. Reports nothing until it is cancelled.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]


class Put(Record, frozen=True):
    """Write host pages to the store, which counts as their use. Reports `Ended`.

    Not ok once `timeout_s` has passed.
    """

    operation: int
    transfers: tuple[ObjectTransfer, ...]
    timeout_s: float
    after: bytes = b""
    """The key of the page of full attention that all of them continue, if a prefix does not begin with
    them: the store is to keep that for as long as them."""
    distance: int = 0
    """How many pages after that the first object comes; 0 where a prefix begins."""


class CopyToHost(Record, frozen=True):
    """Copy device pages to host pages (backup). Reports `Ended`.

    Where the device pages are an engine's, it waits until the executor is told that copies in this
    `direction` begin, and its time runs from then on.
    """

    direction: ClassVar = Direction.TO_HOST
    operation: int
    transfers: tuple[CopyTransfer, ...]
    timeout_s: float


class CopyToDevice(Record, frozen=True):
    """Copy host pages to device pages (load back). Reports `Ended`; begins as `CopyToHost` does."""

    direction: ClassVar = Direction.TO_DEVICE
    operation: int
    transfers: tuple[CopyTransfer, ...]
    timeout_s: float


class Fork(Record, frozen=True):
    """Copy one device page to another, before whatever the engine does after this command.

    In the order of the engine's own work (on a CUDA device: on its current stream), after which
    every later order sees it. Belongs to no operation and reports nothing: it cannot fail but with
    the device itself.
    """

    pool: str
    source: int
    destination: int


class Fence(Record, frozen=True):
    """Wait until these copies read no device page any more; the engine overwrites pages after it.

    What has not ended after `timeout_s` reports `Ended`, not ok, whatever becomes of it; a copy that
    has not begun does so at once, and never begins.
    """

    operations: tuple[int, ...] | None
    """None for all copies of this rank."""
    timeout_s: float


class Cancel(Record, frozen=True):
    """Stop the operation's I/O. Reports `Quiesced` once nothing touches its pages any more.

    After `timeout_s` without quiet it reports `QuiesceExpired`, and `Quiesced` still follows if
    quiet ever comes. An operation whose I/O has already ended is quiesced at once; so is a copy that
    has not begun, which ends, not ok.
    """

    operation: int
    timeout_s: float


class AttachStore(Record, frozen=True):
    """Carry out from now on what concerns storage against the store that was staged for a proposal.

    It is open on every rank. There is no other store: one that was there before is detached.
    """

    proposal: int
    """The digest of the proposal."""


class DetachStore(Record, frozen=True):
    """Let go of the store, and close it in the background.

    Nothing is in flight for it but what is quarantined, which still reports `Quiesced` if quiet ever
    comes. What is ordered of storage after this is refused.
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
