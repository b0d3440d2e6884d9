"""Benchmark of the path from storage to the device: some ranks write, then new ranks read."""

import asyncio
import os
import platform
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from ...errors import ConfigError, LockstepError
from ...page_format.namespace import Namespace, model_digest
from ...ranks.executor.host_memory import available_host_memory
from ...ranks.protocol.orders import KV_POOL
from ...storage_backends.registry import make_backend
from ..rank_processes import Measurement, run_ranks
from ..storage import no_directories_left
from .path_settings import TURNS, PathSettings

if TYPE_CHECKING:
    from .rank import RankSpans, TimedSpan


class PathReport(TypedDict):
    """The report of `lockstep bench path`. GB are 10^9 bytes of KV pages, summed over all ranks."""

    store: str
    page_bytes: int
    ranks: int
    rank_bytes: int
    turns: int
    cold: bool
    threads: int
    """The number of threads that each rank used for bare system calls, equal to the store's threads."""
    l3_l2_gbps: float
    l2_l1_gbps: float
    l2_l3_gbps: float
    first_prefetch_gbps: float
    """The throughput in GB/s of the first prefetch, which begins right after the cache was opened."""
    limit_l3_l2_gbps: float
    limit_l2_l1_gbps: float
    limit_l2_l3_gbps: float
    limit_first_prefetch_gbps: float
    """Upper bound of `first_prefetch_gbps`: the throughput of bare system calls that read into memory
    never accessed before."""
    l3_l2_ratio: float
    l2_l1_ratio: float
    l2_l3_ratio: float
    first_prefetch_ratio: float
    l3_l2_cpu_s_per_gb: float
    limit_l3_l2_cpu_s_per_gb: float
    l2_l3_cpu_s_per_gb: float
    limit_l2_l3_cpu_s_per_gb: float
    limit_device_gbps: float | None
    """The storage device's throughput in GB/s with many concurrent reads past the page cache; None
    unless `cold`."""
    limit_text: str
    """A description of the files that the bare system calls read and wrote."""
    left_behind: bool
    """Whether the pages that the benchmark wrote are still in the store. True for a store that cannot
    list or remove pages."""
    open_s: float
    """Seconds to open the cache. The first prefetch can start only afterwards."""
    load: float
    python: str
    machine: str
    cpus: int


def run(settings: PathSettings, say: Callable[[str], None] = lambda _: None) -> PathReport:
    """Run the benchmark; leaves no pages in a store that can list its contents.

    Raises `ConfigError` if the store cannot be opened, and `StorageError` if the store loses or refuses
    pages. `say` receives progress messages.
    """
    from .rank import measure, read_prompts, write_prompts  # noqa: PLC0415 - needs torch, which takes seconds.

    if not make_backend(settings.store).capabilities.shared:
        raise ConfigError(
            f"store {settings.uri.text!r} is private to one process, but the benchmark reads in"
            " another process; give a store that processes share"
        )
    _require_memory(settings)
    # Use a unique model name, so that only pages written by this run are found.
    settings = replace(settings, model=f"bench-path-{secrets.token_hex(8)}")
    namespace = Namespace(
        model=settings.model, weights_version="0", layouts={KV_POOL: settings.layout}
    ).digest()
    load = os.getloadavg()[0]
    with no_directories_left(settings.limit_directory, namespace):
        try:
            say(f"starting {settings.ranks} ranks that write")
            written = _run(settings, partial(measure, write_prompts, settings, namespace), say)
            say(f"starting {settings.ranks} ranks that read")
            read = _run(settings, partial(measure, read_prompts, settings, namespace), say)
        except BaseException:
            # If the clean-up fails, too, report the original error.
            with suppress(LockstepError, OSError):
                _tidy(settings, namespace)
            raise
        left_behind = not _tidy(settings, namespace)
    return _report(settings, written, read, load, left_behind=left_behind)


def _require_memory(settings: PathSettings) -> None:
    """Raise `ConfigError` if the machine has too little memory for the benchmark."""
    needed = 3 * settings.ranks * settings.rank_bytes
    available, where = available_host_memory()
    if needed > available:
        raise ConfigError(
            f"--bytes is {settings.rank_bytes}, which with --ranks {settings.ranks} takes"
            f" {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB is available"
            f" {where}; give less"
        )


def _run(
    settings: PathSettings, measure: "Callable[..., RankSpans]", say: Callable[[str], None]
) -> "list[RankSpans]":
    return run_ranks(Measurement(settings.ranks, measure, "lockstep.benchmarks.path.rank"), say)


def _tidy(settings: PathSettings, namespace: str) -> bool:
    """Remove everything that the ranks wrote to the store; return whether nothing remains."""
    for left in settings.limit_directory.glob(f"bench-{namespace[:16]}-*"):
        shutil.rmtree(left, ignore_errors=True)
    return asyncio.run(_remove(settings, namespace))


async def _remove(settings: PathSettings, namespace: str) -> bool:
    backend = make_backend(settings.store)
    if not backend.capabilities.lists:
        return False
    ours = {namespace, model_digest(settings.model, "0")}
    await backend.open()
    try:
        names = [each.name async for each in backend.objects() if each.name.namespace in ours]
        return all(await backend.remove(names, deadline=time.monotonic() + 300))
    finally:
        await backend.close()


def _report(
    settings: PathSettings,
    written: "Sequence[RankSpans]",
    read: "Sequence[RankSpans]",
    load: float,
    *,
    left_behind: bool,
) -> PathReport:
    ranks = [replace(w, turns=w.turns | r.turns) for w, r in zip(written, read, strict=True)]
    nbytes = settings.ranks * settings.turn_bytes
    gbps: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for what in ranks[0].turns:
        turns = list(zip(*(rank.turns[what] for rank in ranks), strict=True))
        gbps[what] = nbytes / statistics.median(map(_together_s, turns)) / 1e9
        cpu[what] = statistics.median(sum(each.cpu_s for each in turn) for turn in turns)
        cpu[what] /= nbytes / 1e9
    return PathReport(
        store=settings.uri.text,
        page_bytes=settings.page_bytes,
        ranks=settings.ranks,
        rank_bytes=settings.turn_bytes * TURNS,
        turns=TURNS,
        cold=settings.cold,
        threads=settings.threads,
        l3_l2_gbps=gbps["l3_l2"],
        l2_l1_gbps=gbps["l2_l1"],
        l2_l3_gbps=gbps["l2_l3"],
        first_prefetch_gbps=gbps["first"],
        limit_l3_l2_gbps=gbps["limit_l3_l2"],
        limit_l2_l1_gbps=gbps["limit_l2_l1"],
        limit_l2_l3_gbps=gbps["limit_l2_l3"],
        limit_first_prefetch_gbps=gbps["limit_first"],
        l3_l2_ratio=gbps["l3_l2"] / gbps["limit_l3_l2"],
        l2_l1_ratio=gbps["l2_l1"] / gbps["limit_l2_l1"],
        l2_l3_ratio=gbps["l2_l3"] / gbps["limit_l2_l3"],
        first_prefetch_ratio=gbps["first"] / gbps["limit_first"],
        l3_l2_cpu_s_per_gb=cpu["l3_l2"],
        limit_l3_l2_cpu_s_per_gb=cpu["limit_l3_l2"],
        l2_l3_cpu_s_per_gb=cpu["l2_l3"],
        limit_l2_l3_cpu_s_per_gb=cpu["limit_l2_l3"],
        limit_device_gbps=gbps.get("device"),
        limit_text=_limit_text(settings),
        left_behind=left_behind,
        open_s=max(rank.open_s for rank in read),
        load=load,
        python=platform.python_version(),
        machine=platform.platform(),
        cpus=os.cpu_count() or 1,
    )


def _limit_text(settings: PathSettings) -> str:
    directory = settings.limit_directory
    if settings.files_of_its_own:
        return f"the same files in {directory}"
    if settings.slots:
        return f"the same pages in the slot files in {directory}"
    return f"one file per page in {directory}"


def _together_s(spans: "Sequence[TimedSpan]") -> float:
    """Return the seconds from the first rank's start to the last rank's finish."""
    return max(span.ended for span in spans) - min(span.began for span in spans)
