"""Copies between a CUDA device and pinned host memory, beside the engine's own work.

Each direction has two *lanes*, a stream with a staging buffer of its own, and deals its pages out to
them in turn. On one lane a gather and its transfers follow each other in stream order, which is all
that keeps the staging buffer whole; the other lane's gather runs meanwhile, so that the link between
device and host does not wait for it.

Between staging and host memory, a run of host pages is one call. Where runs are many and short those
calls take longer than the bytes, and one launch of a kernel moves all of a chunk.

Streams are fed by a thread for each direction, because a copy of scattered pages is many calls, and
ends are seen by another, which sleeps until the device reports them. A thread that dies is trouble.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch

from ..protocol.orders import CopyTransfer, Direction
from .copies import CopyJob, Pages, ReportCopy, page_pairs, page_runs, require_forkable
from .copy_threads import CopyThread
from .gathering import fork_page, gather, scatter, slab_pairs
from .pools import TierPools
from .seals import Seals

STAGING_BYTES = 64 << 20
"""Device memory for staging, over both directions."""
_LANES = 2
LONG_RUN_BYTES = 1 << 20
"""Runs of host pages that are as long on average are copied by calls of their own."""
FEW_RUNS = 4
"""So few runs too: their calls take no longer than the launch of a kernel."""

_log = logging.getLogger(__name__)

# Torch leaves both constructors unannotated.
_event = cast("Callable[..., torch.cuda.Event]", torch.cuda.Event)
_stream = cast("Callable[..., torch.cuda.Stream]", torch.cuda.Stream)


class MoveRows(Protocol):
    """`kernels.host_rows.move_rows`, which is there only with Triton."""

    def __call__(
        self, rows: torch.Tensor, pages: torch.Tensor, staging: torch.Tensor, *, to_host: bool
    ) -> None: ...


def row_kernels(pools: Mapping[str, TierPools], device: torch.device) -> dict[str, MoveRows]:
    """Return the kernel for each pool that it can serve, compiled; for none if it fails here."""
    found: dict[str, MoveRows] = {}
    try:
        from .kernels.host_rows import movable, move_rows  # noqa: PLC0415 - Triton may be missing.

        with torch.cuda.device(device):
            for name, pair in pools.items():
                if not movable(pair.layout.page_bytes):
                    continue
                staging = torch.empty((0, pair.layout.page_bytes), dtype=torch.uint8, device=device)
                pages = torch.empty(0, dtype=torch.int64, device=device)
                for to_host in (True, False):
                    move_rows(pair.host.bytes_tensor, pages, staging, to_host=to_host)
                found[name] = move_rows
    except Exception as error:  # noqa: BLE001 - whatever fails, pages can be copied without it.
        _log.warning(
            "host pages that are no neighbours are copied one by one, which is slow if they are "
            "small: Triton does not work here (%s); install triton, a C compiler and the headers of "
            "Python",
            error,
        )
        return {}
    return found


@dataclass(slots=True, eq=False)
class _Lane:
    """A stream and the staging buffer that only this stream touches."""

    stream: torch.cuda.Stream
    staging: torch.Tensor

    def rows(self, count: int, page_bytes: int) -> torch.Tensor:
        """Return the first rows of the staging buffer as [count, page_bytes]."""
        return self.staging[: count * page_bytes].view(count, page_bytes)


@dataclass(slots=True, eq=False)
class _CudaJob(CopyJob):
    ready: torch.cuda.Event = field(kw_only=True)
    """Recorded on the engine's stream when the copy began."""
    used: list[_Lane] = field(default_factory=list[_Lane])
    done: list[torch.cuda.Event] = field(default_factory=list[torch.cuda.Event])
    reason: str = ""


class CudaCopies:
    """Copies between one CUDA device and pinned host pools; see `CopyEngine`.

    A copy begins after everything that was on the engine's current stream at `begin`, both what
    wrote its source pages and what still read its destination pages.
    """

    def __init__(self, pools: Mapping[str, TierPools], report: ReportCopy) -> None:
        self._pools = dict(pools)
        self._device = next(iter(pools.values())).device.device
        self.pairs = {name: slab_pairs(pair) for name, pair in pools.items()}
        self.kernels = row_kernels(pools, self._device)
        self.seals = Seals(pools)
        self._report = report
        self.stopped = False
        self._trouble: str | None = None
        self._ways = {
            direction: _Way(self, direction, pools, self._device) for direction in Direction
        }

    def begin(
        self, direction: Direction, transfers: Sequence[CopyTransfer], operation: int
    ) -> CopyJob:
        try:
            ready = _event()
            ready.record(torch.cuda.current_stream(self._device))
        except RuntimeError as error:
            self._trouble = f"the device failed: {error}"
            failed = CopyJob(operation, direction, transfers)
            self._report(failed.ended(self._trouble))
            return failed
        job = _CudaJob(operation, direction, transfers, ready=ready)
        self._ways[direction].feeder.put(job)
        return job

    def fork(self, pool: str, source: int, destination: int) -> None:
        require_forkable(self._pools, pool, source, destination)
        try:
            fork_page(self.pairs[pool], source, destination)
        except RuntimeError as error:
            self._trouble = f"the device failed: {error}"

    def trouble(self) -> str | None:
        died = (thread.trouble() for way in self._ways.values() for thread in way.threads)
        return self._trouble or next(filter(None, died), None)

    def stop(self) -> None:
        self.stopped = True
        for way in self._ways.values():
            way.feeder.end()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        threads = [thread for way in self._ways.values() for thread in way.threads]
        ended = [thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]
        return all(ended)

    def ended(self, job: _CudaJob) -> None:
        """Report a copy that the device has finished with."""
        cancelled = job.cancelled or self.stopped
        self._report(job.ended(job.reason or ("cancelled" if cancelled else "")))

    def failed(self, reason: str) -> None:
        """Note that the device cannot be relied on any more."""
        self._trouble = self._trouble or reason


def _in_short_runs(hosts: Pages, page_bytes: int) -> bool:
    """Say whether a kernel moves these pages sooner than a call for each run of neighbours does."""
    runs = 1 + int(np.count_nonzero(np.diff(hosts) != 1))
    return runs > FEW_RUNS and len(hosts) * page_bytes < runs * LONG_RUN_BYTES


class _Way:
    """One direction: its lanes, the thread that feeds them and the thread that sees copies end."""

    def __init__(
        self,
        owner: CudaCopies,
        direction: Direction,
        pools: Mapping[str, TierPools],
        device: torch.device,
    ) -> None:
        largest = max(pair.layout.page_bytes for pair in pools.values())
        lane_bytes = max(largest, STAGING_BYTES // (_LANES * len(Direction)))
        self._owner = owner
        self._pools = pools
        self._device = device
        with torch.inference_mode(mode=False):
            self._lanes = [
                _Lane(
                    _stream(device),
                    torch.empty(lane_bytes, dtype=torch.uint8, device=device),
                )
                for _ in range(_LANES)
            ]
        # The buffers were allocated for the current stream, which may still use their memory.
        for lane in self._lanes:
            lane.stream.wait_stream(torch.cuda.current_stream(device))
        self._turn = 0
        begin = partial(torch.cuda.set_device, device)
        self._reaper: CopyThread[_CudaJob] = CopyThread(
            f"lockstep-reap-{direction.name}", self._reap, at_start=begin
        )
        self.feeder: CopyThread[_CudaJob] = CopyThread(
            f"lockstep-feed-{direction.name}",
            self._feed,
            at_start=begin,
            at_end=self._wait_for_launched,
        )
        self.threads = (self.feeder, self._reaper)

    def _wait_for_launched(self) -> None:
        """Wait for what was launched, so that no page is touched once the feeder has ended."""
        try:
            for lane in self._lanes:
                lane.stream.synchronize()
        except RuntimeError as error:
            self._owner.failed(f"the device failed: {error}")
        finally:
            self._reaper.end()

    @torch.no_grad()
    def _feed(self, job: _CudaJob) -> None:
        job.began_s = time.monotonic()
        try:
            for transfer in job.transfers:
                self._launch_transfer(job, transfer)
        except Exception as error:  # noqa: BLE001 - a failed copy is an outcome.
            job.reason = str(error) or repr(error)
        try:
            for lane in job.used:
                event = _event(blocking=True)
                event.record(lane.stream)
                job.done.append(event)
        except Exception as error:  # noqa: BLE001 - as above; the device itself has failed.
            job.reason = job.reason or str(error) or repr(error)
            self._owner.failed(f"the device failed: {job.reason}")
        self._reaper.put(job)

    def _launch_transfer(self, job: _CudaJob, transfer: CopyTransfer) -> None:
        pools = self._pools[transfer.pool]
        hosts, devices = page_pairs(job, transfer, pools)
        if job.direction is Direction.TO_DEVICE:
            self._owner.seals.check(transfer)
        else:
            pools.host.begin_writes(hosts)
        chunk_pages = self._lanes[0].staging.numel() // pools.layout.page_bytes
        for first in range(0, len(hosts), chunk_pages):
            if job.cancelled or self._owner.stopped:
                return
            lane = self._lanes[self._turn % _LANES]
            self._turn += 1
            chunk = slice(first, first + chunk_pages)
            with torch.cuda.stream(lane.stream):
                if lane not in job.used:
                    lane.stream.wait_event(job.ready)
                    job.used.append(lane)
                self._launch_chunk(job.direction, transfer.pool, lane, hosts[chunk], devices[chunk])
            job.nbytes += len(hosts[chunk]) * pools.layout.page_bytes

    def _launch_chunk(
        self, direction: Direction, pool: str, lane: _Lane, hosts: Pages, devices: Pages
    ) -> None:
        pairs, rows = self._owner.pairs[pool], self._pools[pool].host.bytes_tensor
        staging = lane.rows(len(hosts), rows.shape[1])
        # Pinned, because the device would otherwise make this thread wait for all work before it.
        places = torch.from_numpy(np.stack((hosts, devices))).pin_memory()
        on_host, on_device = places.to(self._device, non_blocking=True)
        to_host = direction is Direction.TO_HOST
        if to_host:
            gather(pairs, on_device, staging)
        move_rows = self._owner.kernels.get(pool)
        if move_rows and _in_short_runs(hosts, rows.shape[1]):
            move_rows(rows, on_host, staging, to_host=to_host)
        else:
            for slot, at, count in page_runs(hosts, np.arange(len(hosts)), len(hosts)):
                there, here = rows[slot : slot + count], staging[at : at + count]
                target, source = (there, here) if to_host else (here, there)
                target.copy_(source, non_blocking=True)
        if not to_host:
            scatter(pairs, on_device, staging)

    def _reap(self, job: _CudaJob) -> None:
        try:
            for event in job.done:
                event.synchronize()
            unfit = job.cancelled or self._owner.stopped or job.reason
            if job.direction is Direction.TO_HOST and not unfit:
                self._owner.seals.seal(job.transfers)
        except Exception as error:  # noqa: BLE001 - a failed copy is an outcome.
            # An error that shows only here belongs to the device and not to one copy.
            job.reason = job.reason or str(error) or repr(error)
            self._owner.failed(f"the device failed: {job.reason}")
        self._owner.ended(job)
