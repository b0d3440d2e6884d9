"""Copies of pages between the device and host memory, and the engine that makes them on a CPU.

A copy belongs to an operation, which owns the pages on both sides until a verdict ends it. So no two
copies in flight touch the same page, their order does not matter to the bytes, and neither engine
needs a lock.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...errors import InternalError
from ..protocol.orders import CopyTransfer, Direction
from .copy_threads import CopyThread
from .gathering import SlabPair, fork_page, slab_pairs
from .pools import TierPools
from .seals import Seals

Pages = npt.NDArray[np.int64]
"""Numbers of pages of one pool."""

_RUN_BYTES_MAX = 8 << 20
"""A copy looks at least once in so many bytes whether it was cancelled."""


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A copy is over: nothing on this rank touches its pages for it any more."""

    operation: int
    direction: Direction
    ok: bool
    nbytes: int
    """Bytes copied; 0 unless it went well."""
    reason: str = ""
    """Why it did not go well."""
    began_s: float = 0.0
    """When the copying itself began, on `time.monotonic`'s scale; 0 for one that never did."""
    ended_s: float = 0.0


ReportCopy = Callable[[CopyEnded], None]
"""Called once for each copy, from any thread."""


class CopyEngine(Protocol):
    """Copies pages asynchronously. All methods are called from the engine's thread.

    Each copy begun ends in exactly one `CopyEnded`; what goes wrong with it is in there, and is
    never raised.
    """

    seals: Seals
    """The checksums of pages whose bytes nothing else checks."""

    def begin(
        self, direction: Direction, transfers: Sequence[CopyTransfer], operation: int
    ) -> "CopyJob":
        """Begin a copy and return without waiting for it; it may be cancelled from then on.

        It sees everything that the caller's thread (on a CUDA device: its current stream) wrote
        before this call, and it has ended only when its bytes are visible to all that come after.
        """
        ...

    def fork(self, pool: str, source: int, destination: int) -> None:
        """Copy one device page to another in the order of the engine's own work (see `Fork`).

        On a CPU it is done on return; on a CUDA device it is on the caller's current stream. Raises
        `InternalError` for a page that there is not.
        """
        ...

    def trouble(self) -> str | None:
        """Say why no copy can go well any more, or None."""
        ...

    def stop(self) -> None:
        """Cancel all copies and begin no more; does not wait."""
        ...

    def join(self, timeout_s: float) -> bool:
        """After `stop`: wait until no copy touches a page; say whether that came in time."""
        ...


@dataclass(slots=True, eq=False)
class CopyJob:
    """One copy between `begin` and its end."""

    operation: int
    direction: Direction
    transfers: Sequence[CopyTransfer]
    cancelled: bool = False
    """Set by the engine's thread and read by the one that copies: nothing more of it begins, and it
    ends not ok, unless it is done already."""
    nbytes: int = 0
    began_s: float = 0.0

    def ended(self, reason: str = "") -> CopyEnded:
        """Return how the copy ended: well, unless there is a `reason` why not."""
        nbytes = 0 if reason else self.nbytes
        return CopyEnded(
            self.operation,
            self.direction,
            not reason,
            nbytes,
            reason,
            self.began_s,
            time.monotonic(),
        )


def page_pairs(job: CopyJob, transfer: CopyTransfer, pools: TierPools) -> tuple[Pages, Pages]:
    """Return the host pages of a transfer in ascending order, and the device page of each.

    Raises `InternalError` for a page that its pool does not have.
    """
    sources, destinations = (
        np.array(each, np.int64) for each in (transfer.sources, transfer.destinations)
    )
    to_host = job.direction is Direction.TO_HOST
    hosts, devices = (destinations, sources) if to_host else (sources, destinations)
    if len(hosts) != len(devices):
        raise InternalError(
            f"operation {job.operation} copies {len(sources)} pages to {len(destinations)}"
        )
    for name, pages, count in (
        ("host", hosts, pools.host.pages),
        ("device", devices, pools.device.pages),
    ):
        if len(pages) and (pages.min() < 0 or pages.max() >= count):
            raise InternalError(
                f"operation {job.operation} copies {name} pages {pages.min()} to {pages.max()}; "
                f"the pool has {count}"
            )
    order = np.argsort(hosts)
    return hosts[order], devices[order]


def require_forkable(
    pools: Mapping[str, TierPools], pool: str, source: int, destination: int
) -> None:
    """Raise `InternalError` if the pool of a fork or one of its pages is not there."""
    pair = pools.get(pool)
    if pair is None:
        raise InternalError(f"a fork names pool {pool!r}; known: {', '.join(pools)}")
    pages = pair.device.pages
    if not (0 <= source < pages and 0 <= destination < pages):
        raise InternalError(
            f"a fork copies page {source} of pool {pool!r} to {destination}; it has {pages}"
        )


def page_runs(hosts: Pages, others: Pages, pages_max: int) -> Iterator[tuple[int, int, int]]:
    """Yield (host page, other, count) for pages that are neighbours on both sides, in order."""
    if not len(hosts):
        return
    breaks = np.flatnonzero((np.diff(hosts) != 1) | (np.diff(others) != 1)) + 1
    for start, end in pairwise([0, *breaks.tolist(), len(hosts)]):
        for at in range(start, end, pages_max):
            yield int(hosts[at]), int(others[at]), min(pages_max, end - at)


class CpuCopies:
    """Copies on a CPU, on one thread of its own, in the order in which they were begun.

    The engine's thread stays free, since the copying itself runs outside the interpreter's lock; a
    single thread, so that copies end in their order and the engine keeps its cores.
    """

    def __init__(self, pools: Mapping[str, TierPools], report: ReportCopy) -> None:
        self._tiers = dict(pools)
        self._pools = {name: _CpuPages(pair) for name, pair in pools.items()}
        self.seals = Seals(pools)
        self._report = report
        self._stopped = False
        self._thread = CopyThread("lockstep-copies", self._work)

    def begin(
        self, direction: Direction, transfers: Sequence[CopyTransfer], operation: int
    ) -> CopyJob:
        job = CopyJob(operation, direction, transfers)
        self._thread.put(job)
        return job

    def fork(self, pool: str, source: int, destination: int) -> None:
        require_forkable(self._tiers, pool, source, destination)
        fork_page(self._pools[pool].pairs, source, destination)

    def trouble(self) -> str | None:
        return self._thread.trouble()

    def stop(self) -> None:
        self._stopped = True
        self._thread.end()

    def join(self, timeout_s: float) -> bool:
        return self._thread.join(timeout_s)

    def _work(self, job: CopyJob) -> None:
        job.began_s = time.monotonic()
        try:
            self._copy(job)
            ended = job.ended("cancelled" if job.cancelled or self._stopped else "")
        except Exception as error:  # noqa: BLE001 - a failed copy is an outcome, whatever failed.
            ended = job.ended(str(error) or repr(error))
        self._report(ended)

    def _copy(self, job: CopyJob) -> None:
        for transfer in job.transfers:
            pages = self._pools[transfer.pool]
            page_bytes = pages.pools.layout.page_bytes
            hosts, devices = page_pairs(job, transfer, pages.pools)
            if job.direction is Direction.TO_DEVICE:
                self.seals.check(transfer)
            else:
                pages.pools.host.begin_writes(hosts)
            for host, device, count in page_runs(
                hosts, devices, max(1, _RUN_BYTES_MAX // page_bytes)
            ):
                if job.cancelled or self._stopped:
                    return
                pages.copy(job.direction, host, device, count)
                job.nbytes += count * page_bytes
        if job.direction is Direction.TO_HOST:
            self.seals.seal(job.transfers)


def _rows(words: torch.Tensor) -> npt.NDArray[np.void]:
    """Return pages, [layers, pages, ...], as an array whose elements are whole runs of bytes.

    One `memmove` each, which counts where the axes of a page lie in another order on the device.
    """
    in_bytes = words.view(torch.uint8).numpy()
    return in_bytes.view(np.dtype((np.void, in_bytes.shape[-1])))[..., 0]


@dataclass(slots=True)
class _CpuPages:
    """Both pools as arrays of bytes in one shape; see `SlabPair`."""

    pools: TierPools
    pairs: list[SlabPair] = field(init=False)
    slabs: list[tuple[npt.NDArray[np.void], npt.NDArray[np.void]]] = field(init=False)
    """The rows of each pair as arrays: (host, device)."""

    def __post_init__(self) -> None:
        self.pairs = slab_pairs(self.pools)
        host = self.pools.host.bytes_tensor
        self.slabs = [(_rows(pair.rows(host)), _rows(pair.device)) for pair in self.pairs]

    def copy(self, direction: Direction, host_page: int, device_page: int, count: int) -> None:
        """Copy a run of pages."""
        for host, device in self.slabs:
            if count == 1:
                # One axis less makes the call itself cheaper, which shows on small pages.
                on_host, on_device = host[:, host_page], device[:, device_page]
            else:
                on_host = host[:, host_page : host_page + count]
                on_device = device[:, device_page : device_page + count]
            if direction is Direction.TO_HOST:
                np.copyto(on_host, on_device)
            else:
                np.copyto(on_device, on_host)
