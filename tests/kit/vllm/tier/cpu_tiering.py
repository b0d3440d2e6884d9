"""vLLM's tiered offloading on a CPU: its own spec, with a worker that copies where CUDA would.

vLLM's worker needs a GPU, and all else of its offloading does not. An engine finds this by
`spec_module_path`.
"""

from collections.abc import Iterable

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalPageMapping,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks between the engine's tensors and rows of the shared memory, at once."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, *, canonical: bool
    ) -> None:
        self._kv = kv_caches
        self._region = region
        self._canonical = canonical
        # Every tensor is one layer's, in models with one group.
        mappings = {
            ref.tensor_idx: ref.mapping for refs in kv_caches.group_data_refs for ref in refs
        }
        self._cells = [
            region.create_next_canonical_view(mappings[number].canonical_page_size_bytes)
            if canonical
            else region.create_next_worker_view(each.page_size_bytes)
            for number, each in enumerate(kv_caches.tensors)
        ]
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        for block, cell in self._pairs(src_spec, dst_spec):
            cell.copy_(block)
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for block, cell in self._pairs(dst_spec, src_spec):
            block.copy_(cell)
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is on its way."""

    def shutdown(self) -> None:
        self._cells.clear()
        self._region.cleanup()

    def _pairs(
        self, engine: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of each page in both places."""
        assert isinstance(host, CPULoadStoreSpec)
        at = 0
        for group, size in enumerate(engine.group_sizes):
            for block, chunk in zip(
                engine.block_ids[at : at + size], host.chunk_ids[at : at + size], strict=True
            ):
                for ref in self._kv.group_data_refs[group]:
                    page = self._kv.tensors[ref.tensor_idx].tensor[int(block)]
                    cell = self._cells[ref.tensor_idx][int(chunk)]
                    if self._canonical:
                        yield from _fragments(page, cell, ref.mapping)
                    else:
                        yield page[: ref.page_size_bytes], cell[: ref.page_size_bytes]
            at += size


def _fragments(
    page: torch.Tensor, cell: torch.Tensor, mapping: CanonicalPageMapping
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Where this worker's bytes of a page are in its own order and in the one without workers."""
    for run in mapping.runs:
        for number in range(run.num_fragments):
            ours = run.local_offset + number * run.local_stride
            theirs = run.canonical_offset + number * run.canonical_stride
            length = run.fragment_size
            yield page[ours : ours + length], cell[theirs : theirs + length]


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with `CopyingWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = self._worker
        if worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = self._worker = CopyingWorker(
                kv_caches, region, canonical=self.config.canonical_layout
            )
        return worker
