"""Runs replays with one rank in the test's process."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lockstep import Cache
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.replay.worker import limits_of
from lockstep.small_engine.counts import ReplayCounts
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.scheduler import Scheduler
from lockstep.small_engine.workload import synthetic_requests


def opened(settings: ReplaySettings) -> Cache:
    collective = InProcessGroup(1).member(0)
    return Cache.open(settings.cache_config(), collective, device=torch.device("cpu"))


def scheduler(
    settings: ReplaySettings,
    cache: Cache,
    requests: Iterator[WorkloadRequest] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Scheduler:
    return Scheduler(
        cache,
        synthetic_requests(settings.seed, settings.requests) if requests is None else requests,
        replace(limits_of(settings), idle_steps_max=5000),
        stopped=stopped,
    )


def replayed(settings: ReplaySettings) -> ReplayCounts:
    cache = opened(settings)
    try:
        run = scheduler(settings, cache)
        assert run.run()
        assert cache.flush()
        return run.counts
    finally:
        cache.close()
