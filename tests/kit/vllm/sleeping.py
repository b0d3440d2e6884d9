"""A CPU worker that sleeps like vLLM's GPU worker, and that runs backups as late as allowed.

vLLM loads this class by `worker_cls`. A sleep overwrites the KV cache with wrong numbers, which would
change all results. A backup reads its pages only at the next step, or when the engine waits for the
backup. If the engine sleeps without waiting for a backup, the backup therefore copies wrong numbers.
"""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from lockstep.ranks.executor.copies import CopyJob, CpuCopies
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.group.one_scheduler.worker import WorkerRank
from lockstep.ranks.protocol.orders import Direction

kv_transfer: Any = import_module("vllm.distributed.kv_transfer")
Worker: Any = import_module("vllm.v1.worker.cpu_worker").CPUWorker

NOTHING_OF_ITS_OWN = 1e4
"""The number that fills the KV cache after a sleep."""


class SleepingWorker(Worker):  # type: ignore[misc] # pyright: ignore[reportUntypedBaseClass]
    """Calls the connector at the points where vLLM's GPU worker calls it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        delay_backups()

    def sleep(self, level: int = 1) -> None:
        """Make the connector stop using the KV caches, and then overwrite the caches."""
        kv_transfer.get_kv_transfer_group().unregister_kv_caches()
        runner: Any = self.model_runner
        caches: list[torch.Tensor] = runner.kv_caches
        for each in caches:
            each.fill_(NOTHING_OF_ITS_OWN)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Call the connector's `restore_kv_caches` if it exists; vLLM 0.32 does not call it."""
        getattr(kv_transfer.get_kv_transfer_group(), "restore_kv_caches", _nothing)()


def delay_backups() -> None:
    """Delay each backup in this process until the next step, the next fence, or the close."""
    may_run = threading.Event()
    classes: tuple[Any, ...] = (CpuCopies, WorkerRank, RankExecutor)
    copies, worker, executor = classes
    copy, begin = copies._copy, worker.begin_backups

    def late(self: CpuCopies, job: CopyJob) -> None:
        if job.direction is Direction.TO_HOST:
            may_run.wait()
        copy(self, job)

    def begin_held(self: WorkerRank) -> None:
        may_run.clear()
        begin(self)

    copies._copy, worker.begin_backups = late, begin_held
    worker.apply_dispatch = _opening(may_run, worker.apply_dispatch)
    executor._fence = _opening(may_run, executor._fence)
    executor.close = _opening(may_run, executor.close)


def _opening(may_run: threading.Event, method: Callable[..., Any]) -> Callable[..., Any]:
    def opening(*arguments: Any) -> Any:
        may_run.set()
        return method(*arguments)

    return opening


def _nothing() -> None:
    pass
