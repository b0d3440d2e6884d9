"""Measures SGLang with HiCache and with Lockstep, in turn, on the same workload: run as a module.

    python -m tests.kit.sglang.beside_hicache [PAIRS]

Two ranks on a CPU, twelve prompts of 464 tokens, a device pool of four of them. In the first workload
they come round and round, all at once, and what has left the device comes back from host memory. In the
second a new process has them in files only. HiCache's copies are those of the plug-in `cpu_hicache`:
the kernels that it has for them run on GPUs alone.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiny_llama

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Answer, RankReport, Request
from tests.kit.sglang.stock import hicache_engine

PROMPTS, SHARED, LENGTH, OUTPUT = 12, 64, 464, 24
ROUNDS = 3
PAIRS = 7

Make = Callable[[Path, Path, Path], RunningEngine]
"""Returns an engine that runs in a folder, with a model and files in another folder."""


def with_hicache(folder: Path, model: Path, store: Path) -> RunningEngine:
    """Return an engine with HiCache."""
    return hicache_engine(folder, model, store=store)


def with_lockstep(folder: Path, model: Path, store: Path) -> RunningEngine:
    """Return an engine with Lockstep."""
    return lockstep_engine(folder, model, store=f"file://{store}")


MAKERS: dict[str, Make] = {"HiCache": with_hicache, "Lockstep": with_lockstep}


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine has taken."""

    host_s: float
    """For the rounds from host memory."""
    storage_s: float
    """For one round from files, in a new process."""
    collectives: float
    """Of the tiers, for each iteration."""
    collective_us: float
    """What one rank spends in them, for each iteration."""
    cached: int
    """Tokens that were cached in the last round from host memory and in that from files."""


def prompts() -> list[Request]:
    """Return the prompts: a shared beginning, and then each its own."""
    shared = [(7 * at) % 500 + 3 for at in range(SHARED)]
    own = [
        [(11 * at + 5 * number * number) % 500 + 3 for at in range(LENGTH - SHARED)]
        for number in range(PROMPTS)
    ]
    return [Request(tokens=[*shared, *each], output_tokens=OUTPUT, logprobs=False) for each in own]


def measure(folder: Path, model: Path, make: Make) -> Measured:
    """Serve both workloads with engines that `make` returns."""
    requests = prompts()
    store = folder / "store"
    with make(folder / "first", model, store) as engine:
        answers = engine.generate(requests)
        before = engine.ranks()[0]
        began = time.perf_counter()
        for _ in range(ROUNDS):
            answers = engine.generate(requests)
        host_s = time.perf_counter() - began
        after = engine.ranks()[0]
        engine.flush()
        engine.shutdown()
    cached = _cached(answers)
    with make(folder / "second", model, store) as engine:
        began = time.perf_counter()
        answers = engine.generate(requests)
        storage_s = time.perf_counter() - began
    calls, spent_us = _collectives(before, after)
    return Measured(host_s, storage_s, calls, spent_us, cached + _cached(answers))


def main() -> None:
    """Print a line for each pair, and the medians."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    found: dict[str, list[Measured]] = {"HiCache": [], "Lockstep": []}
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        tiny_llama.make(model)
        for pair in range(pairs):
            folder = Path(place) / str(pair)
            for name in sorted(MAKERS, reverse=bool(pair % 2)):
                measured = measure(folder / name, model, MAKERS[name])
                found[name].append(measured)
                sys.stdout.write(f"{_line(name, measured)}\n")
                sys.stdout.flush()
    for what in ("host_s", "storage_s", "collectives", "collective_us", "cached"):
        medians = {
            name: statistics.median(getattr(each, what) for each in each_of)
            for name, each_of in found.items()
        }
        ratio = medians["Lockstep"] / medians["HiCache"] if medians["HiCache"] else 0.0
        sys.stdout.write(
            f"median {what:14} HiCache {medians['HiCache']:9.3f}  Lockstep"
            f" {medians['Lockstep']:9.3f}  ratio {ratio:.2f}\n"
        )


def _line(name: str, one: Measured) -> str:
    return (
        f"{name:9} {ROUNDS} rounds from host memory {one.host_s:.2f} s, from files"
        f" {one.storage_s:.2f} s; {one.collectives:.2f} collectives of the tiers an iteration,"
        f" {one.collective_us:.0f} us; {one.cached} tokens cached"
    )


def _cached(answers: list[Answer]) -> int:
    return sum(answer.cached_tokens for answer in answers)


def _collectives(before: RankReport, after: RankReport) -> tuple[float, float]:
    """Return how many collectives of the tiers an iteration has, and how long it spends in them."""
    iterations = after.iterations - before.iterations
    if after.state is not None:
        rounds = after.state["collectives"] - before.state["collectives"]
        return rounds / iterations, after.state["round_us"]
    tiers = [name for name in after.collectives if "sglang.srt.mem_cache" in name]
    tiers += [name for name in after.collectives if "cache_controller" in name]
    calls = sum(after.collectives[name] - before.collectives.get(name, 0) for name in tiers)
    spent_s = sum(after.seconds[name] - before.seconds.get(name, 0.0) for name in tiers)
    return calls / iterations, spent_s / iterations * 1e6


if __name__ == "__main__":
    main()
