"""The memory that holds pages: one pool on the device (L1) and one on the host (L2).

A device pool is arranged for kernels, which read one layer of many pages. A host pool is arranged
for copies and storage, which move whole pages: each page is one contiguous run of bytes.
"""

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, SupportsInt, cast

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ConfigError, InternalError
from ...page_format.page_layout import DTYPE_BYTES, ColumnShard, ShardLayout
from ..protocol.agreed_pools import AgreedPool
from .engine_pages import EnginePages

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""The element types of columns, as torch has them."""


class _CudaRuntime(Protocol):
    """The two functions of the CUDA runtime that pin memory; both return an error code."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> SupportsInt: ...  # noqa: N802

    def cudaHostUnregister(self, address: int, /) -> SupportsInt: ...  # noqa: N802


_cudart = cast("Callable[[], _CudaRuntime]", torch.cuda.cudart)
_REGISTER_PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory is pinned for every device of this process."""


class DevicePages(Protocol):
    """Pages on a device, whoever owns them, as copies see them."""

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    @property
    def pages(self) -> int:
        """How many there are; they are numbered from 0."""
        ...

    @property
    def lent(self) -> bool:
        """Whether they belong to an engine, which lends them for the time of a copy."""
        ...

    def slabs(self, shard: ColumnShard) -> list[torch.Tensor]:
        """Return views [layers, pages, heads, tokens, bytes] of the column's layers in order; uint8.

        Tokens and bytes may be several axes each, the outermost first, as an engine's tensors have
        them. The last axis is contiguous; all else may have any strides.
        """
        ...


class DevicePool:
    """Pages on the device: for each column a tensor [layers, pages, heads, page_tokens, elements].

    The tensors are contiguous, zero at first, and belong to the pool; kernels write into them. Zero,
    because attention reads whole pages under a mask, and a mask does not undo a NaN.
    """

    lent = False

    def __init__(self, layout: ShardLayout, pages: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = pages
        # Tensors made in inference mode could not be written outside of it, as copies do.
        with torch.inference_mode(mode=False):
            try:
                self._columns = {
                    shard.column.name: torch.zeros(
                        self._shape(shard), dtype=TORCH_DTYPES[shard.column.dtype], device=device
                    )
                    for shard in layout.columns
                }
            except RuntimeError as error:
                # torch's own words are of the allocator, and on a CPU several lines.
                why = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{pages} device pages cannot be had on {device}: {why}; lower device_pages"
                ) from error
        # A device that was given without its index has one here.
        self.device = next(iter(self._columns.values())).device

    def column(self, name: str) -> torch.Tensor:
        """Return the tensor of the column `name`, the same one each time; no copy."""
        return self._columns[name]

    def column_bytes(self, shard: ColumnShard) -> torch.Tensor:
        """Return a column as a view [layers, pages, heads, tokens, bytes]; uint8, no copy."""
        return self._columns[shard.column.name].view(torch.uint8)

    def slabs(self, shard: ColumnShard) -> list[torch.Tensor]:
        """Return the column as one view; see `DevicePages`."""
        return [self.column_bytes(shard)]

    def _shape(self, shard: ColumnShard) -> tuple[int, ...]:
        column, tokens = shard.column, self.layout.page_tokens
        return (shard.layers, self.pages, shard.heads, tokens, column.elements)


class PageLease(NamedTuple):
    """The bytes of a host page for a reader, until the slot gets other content (rule R7)."""

    view: memoryview
    slot: int
    generation: int
    """The slot's generation when the lease was made."""
    generations: npt.NDArray[np.int64]
    """The generations of all slots of the pool, by now."""

    @property
    def is_current(self) -> bool:
        """Whether nothing has begun to write other content to the slot since."""
        return bool(self.generations[self.slot] == self.generation)


class HostPool:
    """Pages in host memory: one uint8 tensor [pages, page_bytes], zero at first.

    It starts at a multiple of 4096 bytes, and pages follow each other without gaps. Pages cost no
    memory until they are first written, unless the pool is pinned. Pinned memory is for copies to
    and from a CUDA device; it needs one, and raises `ConfigError` if the memory cannot be pinned.
    """

    def __init__(self, layout: ShardLayout, pages: int, *, pinned: bool) -> None:
        self.layout = layout
        self.pages = pages
        self.pinned = pinned
        self._generations = np.zeros(pages, np.int64)
        nbytes = pages * layout.page_bytes
        # Torch's own pinned memory is rounded up to a power of two, which can double the pool; an
        # anonymous mapping is exact, lazy and aligned, and can be pinned where it lies.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._mapping = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except OSError as error:
            raise ConfigError(
                f"there are no {nbytes / 2**30:.2f} GiB for {pages} host pages: {error.strerror}; lower"
                " host_pages (host_memory_gib in an engine's configuration), or raise what this process"
                " may map (ulimit -v)"
            ) from error
        self._memory = memoryview(self._mapping)[:nbytes]
        # Larger pages of the kernel's are a matter of speed, and some kernels refuse them.
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(mode=False):
            whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
            self.bytes_tensor = whole[:nbytes].view(pages, layout.page_bytes)
        self._registered = False
        if pinned and nbytes:
            self._register(nbytes)

    def page(self, slot: int) -> memoryview:
        """Return the bytes of one page: writable, no copy, `page_bytes` long.

        The view stays valid as long as somebody holds it, also beyond the pool's life.
        """
        if not 0 <= slot < self.pages:
            raise InternalError(f"there is no host page {slot}; the pool has {self.pages}")
        start = slot * self.layout.page_bytes
        return self._memory[start : start + self.layout.page_bytes]

    def page_views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the bytes of some pages, as `page` does for each."""
        memory, step = self._memory, self.layout.page_bytes
        if slots and not 0 <= min(slots) <= max(slots) < self.pages:
            raise InternalError(
                f"there are no host pages {min(slots)} to {max(slots)}; the pool has {self.pages}"
            )
        return [memory[slot * step : (slot + 1) * step] for slot in slots]

    def leases(self, slots: Sequence[int]) -> list[PageLease]:
        """Return the bytes of some pages as they are now; each lease ends with `begin_writes`."""
        views, known = self.page_views(slots), self._generations
        found = known[np.array(slots, np.int64)].tolist()
        return [PageLease(*each, known) for each in zip(views, slots, found, strict=True)]

    def begin_writes(self, slots: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Raise the generation of slots, before anything writes new content to them."""
        self._generations[np.asarray(slots, np.int64)] += 1

    @property
    def memory(self) -> memoryview:
        """The bytes of all pages; writable, no copy."""
        return self._memory

    def close(self) -> None:
        """Unpin the memory; nothing may touch it from the device any more. Idempotent."""
        if self._registered:
            self._registered = False
            _cudart().cudaHostUnregister(self.bytes_tensor.data_ptr())

    def _register(self, nbytes: int) -> None:
        # A fork would turn pinned pages into copies that the device does not know.
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_DONTFORK)
        address = self.bytes_tensor.data_ptr()
        result = int(_cudart().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
        if result:
            raise ConfigError(
                f"{nbytes / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error "
                f"{result}); lower host_pages, or raise the limit on locked memory"
            )
        self._registered = True


@dataclass(frozen=True, slots=True)
class TierPools:
    """The pages of one kind on this rank's two tiers of memory, in one layout."""

    device: DevicePages
    host: HostPool

    @property
    def layout(self) -> ShardLayout:
        """The layout that both pools have."""
        return self.host.layout


def make_pools(
    agreed: Mapping[str, AgreedPool], device: torch.device | Mapping[str, EnginePages]
) -> dict[str, TierPools]:
    """Make the host pages of every pool beside its device pages, which are made or an engine's.

    Raises `ConfigError` where an engine's are not those of just these pools.
    """
    if not isinstance(device, torch.device):
        if device.keys() != agreed.keys():
            raise ConfigError(
                f"the engine lends device pages for the pools {', '.join(sorted(device))}, and the"
                f" model has the pools {', '.join(sorted(agreed))}"
            )
        for name, lent in device.items():
            lent.require_fits(name, agreed[name].layout)
    pools: dict[str, TierPools] = {}
    try:
        for name, pool in agreed.items():
            if isinstance(device, torch.device):
                pages: DevicePages = DevicePool(pool.layout, pool.device_pages, device)
            else:
                pages = device[name]
            pinned = pages.device.type == "cuda"
            # Pinning makes a context on the current device, which need not be this rank's.
            with torch.cuda.device(pages.device) if pinned else contextlib.nullcontext():
                host = HostPool(pool.layout, pool.host_pages, pinned=pinned)
            pools[name] = TierPools(pages, host)
    except BaseException:
        for pair in pools.values():
            pair.host.close()
        raise
    return pools
