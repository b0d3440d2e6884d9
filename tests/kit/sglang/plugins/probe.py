"""Counts each rank's scheduler iterations and collectives, reports the counts, and injects faults.

Counting starts when the scheduler enters its loop. `Engine.collective_rpc` calls
`Scheduler.lockstep_probe(folder=...)` on every rank, which writes `rank<n>.json` to the folder. The
environment variable `LOCKSTEP_PROBE` has the faults as JSON:

- `{"lie_on_rank": 1}`: that rank's prefix cache finds nothing;
- `{"adapters_late_on_rank": 1}`: that rank reads adapters after the others;
- `{"store_fails_on_rank": 1}`: that rank's store loses, delays, corrupts and refuses requests;
- `{"attention_poisoned_on_rank": 1}`, `{"windows_poisoned_on_rank": 1}` and
  `{"states_poisoned_on_rank": 1}`: that rank overwrites loaded data of one of its pools;
- `{"retract_every": 5}`: every rank retracts requests in every fifth forward pass, despite free room.
"""

import inspect
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

FAULTS = "LOCKSTEP_PROBE"
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""The collective functions of `torch.distributed`. A collective that calls another counts once."""

STORE_FAULTS = (
    "fault.seed=2&fault.delay=0.1&fault.delay_ms=20&fault.error=0.05&fault.lost=0.05&fault.lie=0.05"
    "&fault.flip=0.09"
)
"""URI options that make a store fail at random. The seed is one with which the store can write its
manifests, because the store could not open without them."""

LATE_S = 0.3
"""Seconds for which the late rank waits before it reads adapters. In this time a test overwrites the
adapters' files."""

ASKING = "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request"
"""Method of SGLang that runs a collective at the end of each RPC. The collective is not counted,
because only tests send RPCs."""


class Probe:
    """Counters of one rank's scheduler; each process of the engine has one instance."""

    def __init__(self, faults: dict[str, int]) -> None:
        self.faults = faults
        self.rank: int | None = None
        self.iterations = 0
        self._calls: Counter[str] = Counter()
        # HiCache's storage threads run collectives, too, so the counts need a lock, and nested calls
        # are detected by thread.
        self._lock = threading.Lock()
        self._inside = threading.local()

    def begin(self, scheduler: Any) -> None:
        """Start counting; called before the scheduler enters its loop."""
        self.rank = torch.distributed.get_rank()
        if self.is_afflicted("lie_on_rank"):
            _let_it_find_nothing(scheduler.tree_cache)
        for name, pool in (("attention", "kv"), ("windows", "window"), ("states", "state")):
            if self.is_afflicted(f"{name}_poisoned_on_rank"):
                _poison_loads(pool)
        if "retract_every" in self.faults:
            # Set the constants in the scheduler module. Setting SGLang's environment variable would be
            # too late, because SGLang reads it only at import.
            module: Any = import_module("sglang.srt.managers.scheduler")
            module.TEST_RETRACT = True
            module.TEST_RETRACT_INTERVAL = self.faults["retract_every"]

    def is_afflicted(self, fault: str) -> bool:
        return self.rank is not None and self.faults.get(fault) == self.rank

    def collective(self, name: str, launch: Callable[..., Any]) -> Any:
        """Launch a collective, and count it by its name and caller."""
        if self.rank is None or getattr(self._inside, "one", False):
            return launch()
        caller = _caller()
        if caller == ASKING:
            return launch()
        self._inside.one = True
        try:
            return launch()
        finally:
            self._inside.one = False
            with self._lock:
                self._calls[f"{name} from {caller}"] += 1

    def write(self, scheduler: Any, folder: str) -> None:
        cache = scheduler.tree_cache
        state = cache.lockstep_state() if hasattr(cache, "lockstep_state") else None
        with self._lock:
            report = {
                "rank": self.rank,
                "iterations": self.iterations,
                "collectives": dict(self._calls),
                "cache": type(cache).__name__,
                "state": state,
            }
        Path(folder, f"rank{self.rank}.json").write_text(json.dumps(report, default=str))


def register() -> None:
    """Install the hooks; SGLang calls this in each of its processes."""
    probe = Probe(json.loads(os.environ.get(FAULTS, "{}")))
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    register_hook, kinds = hooks.HookRegistry.register, hooks.HookType
    scheduler: Any = import_module("sglang.srt.managers.scheduler").Scheduler

    def count_iteration(scheduler: Any, *arguments: Any, **options: Any) -> None:
        probe.iterations += 1

    def tell(scheduler: Any, folder: str) -> None:
        probe.write(scheduler, folder)

    def come_late(scheduler: Any, *arguments: Any, **options: Any) -> None:
        if probe.is_afflicted("adapters_late_on_rank"):
            time.sleep(LATE_S)

    def counted(name: str) -> Callable[..., Any]:
        def launch(collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            return probe.collective(name, lambda: collective(*arguments, **options))

        return launch

    place = f"{scheduler.__module__}.{scheduler.__qualname__}"
    register_hook(f"{place}.run_event_loop", probe.begin, kinds.BEFORE)
    register_hook(f"{place}._process_hicache_events", count_iteration, kinds.BEFORE)
    register_hook(f"{place}.load_lora_adapter", come_late, kinds.BEFORE)
    if "store_fails_on_rank" in probe.faults:
        _let_the_store_fail(probe.faults["store_fails_on_rank"])
    for name in COLLECTIVES:
        register_hook(f"torch.distributed.distributed_c10d.{name}", counted(name), kinds.AROUND)
    scheduler.lockstep_probe = tell


def _let_it_find_nothing(cache: Any) -> None:
    base: Any = import_module("sglang.srt.mem_cache.base_prefix_cache")
    match = cache.match_prefix

    def nothing(params: Any) -> Any:
        return base.zero_match_result(cache, match(params), params.key.extra_key)

    cache.match_prefix = nothing


def _let_the_store_fail(rank: int) -> None:
    opening: Any = import_module("lockstep.ranks.group.opening")
    make: Callable[[str], Any] = opening.make_backend

    def make_failing(uri: str) -> Any:
        if torch.distributed.get_rank() != rank:
            return make(uri)
        return make(f"fault+{uri}{'&' if '?' in uri else '?'}{STORE_FAULTS}")

    opening.make_backend = make_failing


def _poison_loads(pool: str) -> None:
    copies: Any = import_module("lockstep.ranks.executor.copies").CpuCopies
    orders: Any = import_module("lockstep.ranks.protocol.orders")
    copy: Callable[..., None] = copies._copy

    def copy_and_poison(self: Any, job: Any) -> None:
        copy(self, job)
        if job.direction is not orders.Direction.TO_DEVICE:
            return
        for transfer in job.transfers:
            if transfer.pool == pool:
                for pair in self._pools[pool].pairs:
                    # Set every byte to 0x3F, so that each float32 reads as 0.747.
                    pair.device.view(torch.uint8)[:, list(transfer.destinations)] = 0x3F

    copies._copy = copy_and_poison


def _caller() -> str:
    """Return module and function of a collective's caller, skipping torch, the hooks and this file."""
    frame = inspect.currentframe()
    own = (__name__, "torch", "sglang.srt.plugins.hook_registry")
    while frame is not None and _belongs(frame.f_globals.get("__name__", ""), own):
        frame = frame.f_back
    assert frame is not None
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


def _belongs(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
