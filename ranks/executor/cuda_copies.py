"""Copies between a CUDA device and pinned host memory, beside the engine's own work.

Each direction has two *lanes*, a stream with a staging buffer of its own, and deals its pages out to
them in turn. On one lane a gather and its transfers follow each other in stream order, which is all
that keeps the staging buffer whole; the other lane's gather runs meanwhile, so that the link between
device and host does not wait for it.

Streams are fed by a thread for each direction, because a copy of scattered pages is many calls, and
ends are seen by another, which sleeps until the device reports them. A thread that dies is trouble.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch

from ..orders import CopyTransfer, Direction
from .copies import CopyJob, Pages, ReportCopy, page_pairs, page_runs, require_forkable
from .copy_threads import CopyThread
from .gathering import fork_page, gather, scatter, slab_pairs
from .pools import TierPools
from .seals import Seals

STAGING_BYTES = 64 << 20
"""Device memory for staging, over both directions."""
_LANES = 2

# Torch leaves both constructors unannotated.
_event = cast("Callable[..., torch.cuda.Event]", torch.cuda.Event)
_stream = cast("Callable[..., torch.cuda.Stream]", torch.cuda.Stream)


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

    def __init__(
        self,
        pools: Mapping[str, TierPools],
        report: ReportCopy,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._pools = dict(pools)
        self._device = next(iter(pools.values())).device.device
        self.pairs = {name: slab_pairs(pair) for name, pair in pools.items()}
        self.seals = Seals(pools)
        self._report = report
        self._unfinished: dict[int, _CudaJob] = {}
        self._trouble: str | None = None
        self._ways = {
            direction: _Way(self, direction, pools, self._device, staging_bytes // len(Direction))
            for direction in Direction
        }

    def begin(
        self, direction: Direction, transfers: Sequence[CopyTransfer], operation: int
    ) -> None:
        try:
            ready = _event()
            ready.record(torch.cuda.current_stream(self._device))
        except RuntimeError as error:
            self._trouble = f"the device failed: {error}"
            self._report(CopyJob(operation, direction, transfers).ended(self._trouble))
            return
        job = _CudaJob(operation, direction, transfers, ready=ready)
        self._unfinished[operation] = job
        self._ways[direction].feeder.put(job)

    def cancel(self, operation: int) -> None:
        job = self._unfinished.get(operation)
        if job is not None:
            job.cancelled = True

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
        for job in list(self._unfinished.values()):
            job.cancelled = True
        for way in self._ways.values():
            way.feeder.end()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        threads = [thread for way in self._ways.values() for thread in way.threads]
        ended = [thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]
        return all(ended)

    def ended(self, job: _CudaJob) -> None:
        """Report a copy that the device has finished with."""
        self._unfinished.pop(job.operation, None)
        self._report(job.ended(job.reason or ("cancelled" if job.cancelled else "")))

    def failed(self, reason: str) -> None:
        """Note that the device cannot be relied on any more."""
        self._trouble = self._trouble or reason


class _Way:
    """One direction: its lanes, the thread that feeds them and the thread that sees copies end."""

    def __init__(
        self,
        owner: CudaCopies,
        direction: Direction,
        pools: Mapping[str, TierPools],
        device: torch.device,
        staging_bytes: int,
    ) -> None:
        largest = max(pair.layout.page_bytes for pair in pools.values())
        lane_bytes = max(largest, staging_bytes // _LANES)
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
        chunk_pages = self._lanes[0].staging.numel() // pools.layout.page_bytes
        for first in range(0, len(hosts), chunk_pages):
            if job.cancelled:
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
        pools, pairs = self._pools[pool], self._owner.pairs[pool]
        staging = lane.rows(len(hosts), pools.layout.page_bytes)
        # Pinned, because the device would otherwise make this thread wait for all work before it.
        index = torch.from_numpy(devices).pin_memory()
        pages = index.to(self._device, non_blocking=True)
        rows = pools.host.bytes_tensor
        runs = page_runs(hosts, np.arange(len(hosts)), len(hosts))
        if direction is Direction.TO_HOST:
            gather(pairs, pages, staging)
            for slot, at, count in runs:
                rows[slot : slot + count].copy_(staging[at : at + count], non_blocking=True)
        else:
            for slot, at, count in runs:
                staging[at : at + count].copy_(rows[slot : slot + count], non_blocking=True)
            scatter(pairs, pages, staging)

    def _reap(self, job: _CudaJob) -> None:
        try:
            for event in job.done:
                event.synchronize()
            if job.direction is Direction.TO_HOST and not (job.cancelled or job.reason):
                self._owner.seals.seal(job.transfers)
        except Exception as error:  # noqa: BLE001 - a failed copy is an outcome.
            # An error that shows only here belongs to the device and not to one copy.
            job.reason = job.reason or str(error) or repr(error)
            self._owner.failed(f"the device failed: {job.reason}")
        self._owner.ended(job)
