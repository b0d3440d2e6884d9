"""SGLang on two ranks with HiCache, then with Lockstep, and one rank's store loses or spoils pages.

Both serve the same prompts with the same flags, first with empty stores. Then each finds a copy of what
it wrote in which rank 1's part was changed, in new processes. What each answered is printed beside what
SGLang answers without either. Everything is written to a temporary folder. Exit status 0: with Lockstep
every answer was right and came in time, whatever HiCache's were.

SGLang has no kernels of its own for CPUs: `tests/kit/sglang/stand_ins` stands in for two packages that
it imports, and `tests/kit/sglang/plugins/cpu_hicache.py` for three copies between HiCache's host memory
and the device, and for pinned memory. Schedulers, trees, votes, threads and storage are SGLang's.
"""

import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if find_spec("sglang") is None:
    sys.exit(
        f"SGLang is not installed in {sys.prefix}: run `make sglang-disagreeing-stores` in {ROOT}"
    )
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "disagreeing_stores")]

import tiny_llama  # noqa: E402 - it is found from here on.

from tests.kit.sglang.engine import EngineEndedError, RunningEngine  # noqa: E402 - as above.
from tests.kit.sglang.requests import Answer, RankReport, Request  # noqa: E402 - as above.

RANKS = 2
DEADLINE_S = 60.0
"""Twelve answers take seconds: what is not there by then hangs."""
COMPILE_S = 300.0

PAGE_TOKENS = 16
REQUESTS = [
    Request(tokens=[3 + 40 * prompt] + [(7 * at + 31 * prompt) % 500 + 3 for at in range(299)])
    for prompt in range(12)
]
"""They share nothing; the device has room for six, so all else comes from below."""

SMALL: dict[str, Any] = {
    "page_size": PAGE_TOKENS,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
}
TIERS: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "timeout",
}
"""What both are told: host memory for eight times the device's pages, and SGLang's usual policies."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One of the two: how SGLang is started with it, and which files are rank 1's pages."""

    name: str
    start: Callable[[Path, Path, Path], RunningEngine]
    """With a folder to work in, the model, and the folder of the store."""
    files_of_rank_1: str


def with_hicache(folder: Path, model: Path, store: Path, **others: Any) -> RunningEngine:
    """SGLang with HiCache and its store of files; `others` are flags that differ."""
    return RunningEngine(
        folder,
        model,
        tp=RANKS,
        plugins=("lockstep_probe", "cpu_hicache"),
        environment={
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store),
            "TORCH_EXTENSIONS_DIR": str(model.parent / "compiled"),
        },
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_storage_backend="file",
        # It would not ask storage for prompts as short as these.
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE_TOKENS}),
        **SMALL,
        **TIERS | others,
    )


def with_lockstep(folder: Path, model: Path, store: Path) -> RunningEngine:
    """SGLang with Lockstep and a store of files for each rank."""
    extra = {"store": f"file://{store}/rank{{rank}}", "weight_digests": str(folder / "digests")}
    return RunningEngine(
        folder,
        model,
        tp=RANKS,
        plugins=("lockstep_probe", "lockstep"),
        radix_cache_backend="lockstep",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        **SMALL,
        **TIERS,
    )


CACHES = (
    Cache("HiCache", with_hicache, f"*_1_{RANKS}.bin"),
    Cache("Lockstep", with_lockstep, "rank1/objects/*/*/*"),
)


def lose_one(pages: Sequence[Path]) -> None:
    """Remove one page."""
    pages[len(pages) // 2].unlink()


def lose_half(pages: Sequence[Path]) -> None:
    """Remove every second page."""
    for page in pages[::2]:
        page.unlink()


def empty_half(pages: Sequence[Path]) -> None:
    """Leave every second page there, with nothing in it."""
    for page in pages[::2]:
        page.write_bytes(b"")


def damage_one(pages: Sequence[Path]) -> None:
    """Change the second half of one page, and leave its size."""
    page = pages[len(pages) // 2]
    content = page.read_bytes()
    half = len(content) // 2
    page.write_bytes(content[:half] + bytes(each ^ 0x55 for each in content[half:]))


CASES: tuple[tuple[str, Callable[[Sequence[Path]], None] | None], ...] = (
    ("new processes, stores whole", None),
    ("rank 1's store has lost one page", lose_one),
    ("rank 1's store has lost every second page", lose_half),
    ("rank 1's store has every second page, but it is empty", empty_half),
    ("rank 1's store has changed one page", damage_one),
)

TOLD = (
    r"rank \d lacks page",
    r"in quarantine",
    r"prefetch success .*completed=(?!288\b)",
    r"Error: ",
)
"""What is worth reading in the logs: of each the first line is printed, and how many there were.

HiCache says `prefetch success` of all that it reads: here of those that brought less than was asked."""
LONG_NAME = re.compile(r"\b([0-9a-f]{8})[-\w/]{24,}")
"""Names of pages, of which the beginning will do."""


def pages_of_rank_1(cache: Cache, store: Path) -> list[Path]:
    """Return the files of rank 1's pages, oldest first; a few other files have other sizes."""
    files = [path for path in store.glob(cache.files_of_rank_1) if path.is_file()]
    if not files:
        sys.exit(f"{cache.name} has stored nothing, so nothing can be lost: see above")
    [(size, _)] = Counter(path.stat().st_size for path in files).most_common(1)
    pages = [path for path in files if path.stat().st_size == size]
    return sorted(pages, key=lambda path: (path.stat().st_mtime_ns, path.name))


@dataclass(frozen=True, slots=True)
class Reference:
    """What SGLang does without either cache."""

    answers: list[Answer]
    collectives: set[str]


def compile_for_hicache(folder: Path, model: Path) -> None:
    """Let HiCache compile its hash of pages, which it does when it first asks its storage.

    Until then it finds nothing there. This request waits for it.
    """
    policy = {"hicache_storage_prefetch_policy": "wait_complete"}
    with with_hicache(folder / "first", model, folder / "stores" / "first", **policy) as engine:
        engine.generate(REQUESTS[:1], deadline_s=COMPILE_S)


def run_with(
    cache: Cache, folder: Path, model: Path, store: Path, stock: Reference, *, times: int = 1
) -> bool:
    """Start SGLang and serve all prompts; return whether each time all was right and in time."""
    began = time.monotonic()
    try:
        with cache.start(folder, model, store) as engine:
            began = time.monotonic()
            good = [serve(engine, cache.name, stock) for _ in range(times)]
            # What is on its way to storage is written before it ends.
            stuck = engine.shutdown()
    except EngineEndedError as error:
        why, _, log = str(error).partition(";")
        print(f"  {cache.name:9}NOT ANSWERED after {time.monotonic() - began:.0f} s: {why}")
        tell_log(log)
        return False
    if stuck:
        print(f"{'':11}{len(stuck)} processes did not end, and were killed")
    return all(good) and not stuck


def serve(engine: RunningEngine, name: str, stock: Reference) -> bool:
    """Send all prompts at once, and print what came of it; return whether all was right."""
    before, said = engine.ranks()[0], len(engine.log())
    began = time.monotonic()
    answers = engine.generate(REQUESTS, deadline_s=DEADLINE_S)
    seconds = time.monotonic() - began
    after = engine.ranks()[0]
    pairs = zip(stock.answers, answers, strict=True)
    right = sum(one.tokens == other.tokens for one, other in pairs)
    verdict = "right" if right == len(answers) else "WRONG"
    cached = " ".join(str(answer.cached_tokens) for answer in answers)
    print(
        f"  {name:9}{verdict}: {right} of {len(answers)} as stock  {seconds:4.1f} s  cached {cached}"
    )
    print(f"{'':11}{agreement(before, after, stock.collectives)}")
    tell_log(engine.log()[said:])
    return right == len(answers)


def agreement(before: RankReport, after: RankReport, of_stock: set[str]) -> str:
    """Return what agreeing on the tiers took rank 0's scheduler: collectives, and time in them.

    For Lockstep it is the time of whole steps, with the wait for the round and all that follows from
    it; for HiCache that of the votes alone.
    """
    iterations = after.iterations - before.iterations
    counts, seconds = Counter(after.collectives), Counter(after.seconds)
    counts.subtract(before.collectives)
    seconds.subtract(before.seconds)
    # HiCache's storage threads vote too, and do not hold its scheduler up with that.
    votes = {each for each in counts.keys() - of_stock if "UnifiedRadixCache" in each}
    others = sum(counts[each] for each in counts.keys() - of_stock - votes)
    count, spent = sum(counts[each] for each in votes), sum(seconds[each] for each in votes)
    if after.state is not None:
        count += after.state["rounds"] - before.state["rounds"]
        spent += after.state["rounds_s"] - before.state["rounds_s"]
    return (
        f"{iterations} iterations: {count / iterations:.2f} collectives and"
        f" {1000 * spent / iterations:.2f} ms for each, {others} in threads"
    )


def tell_log(text: str) -> None:
    """Print the lines of a log that say what became of the pages."""
    for pattern in TOLD:
        lines = [line for line in text.splitlines() if re.search(pattern, line)]
        if lines:
            line = re.sub(r"^\[[\d :-]+ (TP\d)\]", r"\1:", LONG_NAME.sub(r"\1...", lines[0]))
            more = f" ({len(lines) - 1} more)" if len(lines) > 1 else ""
            print(f"{'':11}log: {line}{more}")


def main() -> int:
    """Run all cases, and print what became of each."""
    with tempfile.TemporaryDirectory(prefix="sglang-disagreeing-stores-") as name:
        folder, verdicts = Path(name), dict[str, bool]()
        model = folder / "model"
        tiny_llama.make(model)
        print("HiCache compiles its hash of pages ...", flush=True)
        compile_for_hicache(folder, model)
        print(f"SGLang on {RANKS} ranks, {len(REQUESTS)} prompts at once:")
        print("without HiCache and without Lockstep")
        plugins = ("lockstep_probe",)
        with RunningEngine(folder / "stock", model, tp=RANKS, plugins=plugins, **SMALL) as engine:
            answers = engine.generate(REQUESTS, deadline_s=DEADLINE_S)
            stock = Reference(answers, set(engine.ranks()[0].collectives))
        print(f"  the reference: {len({tuple(each.tokens) for each in answers})} different answers")
        print("empty stores; then the same again, which host memory has")
        for cache in CACHES:
            place, store = folder / cache.name, folder / "stores" / cache.name
            verdicts[cache.name] = run_with(cache, place, model, store, stock, times=2)
        for number, (case, spoil) in enumerate(CASES):
            print(case)
            for cache in CACHES:
                place, store = (
                    folder / f"{cache.name}{number}",
                    folder / f"case{number}" / cache.name,
                )
                shutil.copytree(folder / "stores" / cache.name, store)
                if spoil is not None:
                    spoil(pages_of_rank_1(cache, store))
                verdicts[cache.name] &= run_with(cache, place, model, store, stock)
    return 0 if verdicts["Lockstep"] else 1


if __name__ == "__main__":
    sys.exit(main())
