"""What it costs an engine to be watched: steps that are scraped, or timed, beside others.

    python -m lockstep.benchmarks.watching --step-ms 5 --scrapes-per-s 1

One rank with a real cache computes, inserts and lets go of prompts. Ways take turns for a second or so
each, so that what else the machine does meets all of them; each turn is compared with the unwatched one
right before it.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import count

import numpy as np
import torch

from ..coordinator.collectives.in_process import InProcessGroup
from ..page_format.page_layout import Column, PageLayout
from ..ranks.cache import Cache
from ..ranks.config import CacheConfig
from ..ranks.timed_events import Timeline
from ..telemetry.kept_events import KeptEvents
from ..telemetry.port import serve_metrics

PAGE_TOKENS = 16
PROMPT_PAGES = 8
STEPS_OF_A_PROMPT = 8
SCRAPER = """
import sys, time, urllib.request
url, pause_s = sys.argv[1], float(sys.argv[2])
while True:
    urllib.request.urlopen(url).read()
    time.sleep(pause_s)
"""
"""What a scraper does, in a process of its own."""


class _Engine:
    """Takes steps of a length, in each of which the cache has something to do."""

    def __init__(self, cache: Cache, step_s: float) -> None:
        self._cache = cache
        self._step_s = step_s
        self._names = map("r{}".format, count())
        self._random = np.random.default_rng(1)
        self._matrix = torch.rand(256, 256)

    def steps_us(self, steps: int) -> float:
        """Take steps; return the mean time of one in microseconds, without what the model takes."""
        modelled_s = 0.0
        began_s = time.perf_counter()
        for step in range(steps):
            if step % STEPS_OF_A_PROMPT == 0:
                self._serve()
            computing_s = time.perf_counter()
            while time.perf_counter() - computing_s < self._step_s:
                torch.mm(self._matrix, self._matrix)
            modelled_s += time.perf_counter() - computing_s
            self._cache.step()
        return (time.perf_counter() - began_s - modelled_s) / steps * 1e6

    def _serve(self) -> None:
        name = next(self._names)
        tokens = self._random.integers(0, 1 << 30, PROMPT_PAGES * PAGE_TOKENS, dtype=np.int32)
        self._cache.load_back(name, tokens[:0], reserve_tokens=len(tokens))
        self._cache.insert(name, tokens)
        self._cache.release(name)


def run(*, step_ms: float, scrapes_per_s: float, steps: int, turns: int) -> dict[str, list[float]]:
    """Return what the cache took of each step in microseconds, turn by turn, by the way of watching."""
    took: dict[str, list[float]] = {"unwatched": [], "scraped": [], "timeline": []}
    with (
        closing(_open(None)) as cache,
        closing(_open(KeptEvents().note)) as timed_cache,
        closing(serve_metrics(partial(cache.stats, rounds=0), 0)) as port,
    ):
        engine, timed = (_Engine(each, step_ms / 1000) for each in (cache, timed_cache))
        for each in (engine, timed):
            each.steps_us(steps)
        for _ in range(turns):
            took["unwatched"].append(engine.steps_us(steps))
            took["scraped"].append(_scraped(engine, port.port, scrapes_per_s, steps))
            took["timeline"].append(timed.steps_us(steps))
    return took


def _open(timeline: Timeline | None) -> Cache:
    layout = PageLayout(
        page_tokens=PAGE_TOKENS, columns=(Column(name="kv", layers=1, heads=1, elements=64),)
    )
    config = CacheConfig(model="bench", layout=layout, device_pages=512, host_pages=2048)
    return Cache.open(config, InProcessGroup(1).member(0), timeline=timeline)


def _scraped(engine: _Engine, port: int, scrapes_per_s: float, steps: int) -> float:
    line = [
        sys.executable,
        "-c",
        SCRAPER,
        f"http://127.0.0.1:{port}/metrics",
        f"{1 / scrapes_per_s}",
    ]
    with subprocess.Popen(line) as scraper:
        try:
            return engine.steps_us(steps)
        finally:
            scraper.terminate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each way of watching."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--scrapes-per-s", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(arguments)
    took = run(
        step_ms=options.step_ms,
        scrapes_per_s=options.scrapes_per_s,
        steps=options.steps,
        turns=options.turns,
    )
    unwatched = took["unwatched"]
    print(
        f"of a step of {options.step_ms:g} ms the cache takes, us; medians of {options.turns} turns"
    )
    for way, times in took.items():
        more = statistics.median(b - a for a, b in zip(unwatched, times, strict=True))
        share = more / (options.step_ms * 1000)
        print(
            f"{way:<10} {statistics.median(times):7.1f}  {more:+6.1f} us a step, {share:+.2%} of it"
        )


if __name__ == "__main__":
    main()
