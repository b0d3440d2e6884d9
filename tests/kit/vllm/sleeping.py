"""A worker on a CPU that sleeps as vLLM's does on a GPU, where backups take as long as they may.

vLLM finds it by `worker_cls`. When it sleeps, its KV cache is overwritten with numbers that change all
that is computed from them. A backup reads only once something waits for it, or with the next step: one
that nobody waits for before the engine sleeps copies these numbers.
"""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from lockstep.ranks.executor.copies import CopyJob, CpuCopies
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.group.decider.worker import WorkerRank
from lockstep.ranks.protocol.orders import Direction

kv_transfer: Any = import_module("vllm.distributed.kv_transfer")
Worker: Any = import_module("vllm.v1.worker.cpu_worker").CPUWorker

NOTHING_OF_ITS_OWN = 1e4
"""The content of memory that was mapped anew."""


class SleepingWorker(Worker):  # type: ignore[misc] # pyright: ignore[reportUntypedBaseClass]
    """Calls the connector where vLLM's worker on a GPU calls it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        delay_backups()

    def sleep(self, level: int = 1) -> None:
        """Let the connector know, and lose the KV."""
        kv_transfer.get_kv_transfer_group().unregister_kv_caches()
        runner: Any = self.model_runner
        caches: list[torch.Tensor] = runner.kv_caches
        for each in caches:
            each.fill_(NOTHING_OF_ITS_OWN)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Let the connector know; vLLM 0.32 does not."""
        getattr(kv_transfer.get_kv_transfer_group(), "restore_kv_caches", _nothing)()


def delay_backups() -> None:
    """Hold backups in this process from their beginning until a step or a fence comes."""
    may_run = threading.Event()
    classes: tuple[Any, ...] = (CpuCopies, WorkerRank, RankExecutor)
    copies, worker, executor = classes
    copy: Callable[[CpuCopies, CopyJob], None] = copies._copy
    begin = worker.begin_backups

    def late(self: CpuCopies, job: CopyJob) -> None:
        if job.direction is Direction.TO_HOST:
            may_run.wait()
        copy(self, job)

    def begin_held(self: WorkerRank) -> None:
        may_run.clear()
        begin(self)

    copies._copy, worker.begin_backups = late, begin_held
    for owner, name in ((worker, "obey"), (executor, "_fence"), (executor, "close")):
        setattr(owner, name, _opening(may_run, getattr(owner, name)))


def _opening(may_run: threading.Event, method: Callable[..., Any]) -> Callable[..., Any]:
    def opening(*arguments: Any) -> Any:
        may_run.set()
        return method(*arguments)

    return opening


def _nothing() -> None:
    pass
