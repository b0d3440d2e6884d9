"""Stores that are attached and detached under running engines: real caches, real stores (rule R14)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from lockstep import (
    Cache,
    CacheConfig,
    Column,
    ConfigError,
    PageLayout,
    StopPolicy,
    StopRule,
    Timeouts,
    UsageError,
)
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.ranks.protocol.agreed_pools import shard_layouts
from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.ranks.replica.attaching import StoreState
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.page_keys import namespace_seed, page_keys
from lockstep.small_engine.contents import PageContents
from lockstep.storage_backends import registry
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.uri import StoreUri
from tests.kit.ranks.executor_parts import PATIENCE_S

T = TypeVar("T")
Tokens = npt.NDArray[np.int32]

RANKS = 2
PAGE_TOKENS = 4
CONFIG = CacheConfig(
    model="m",
    layout=PageLayout(
        page_tokens=PAGE_TOKENS, columns=(Column(name="k", layers=2, heads=4, elements=6),)
    ),
    device_pages=64,
    host_pages=64,
    stop_policy=StopPolicy(rule=StopRule.WAIT_COMPLETE),
    timeouts=Timeouts(open_s=PATIENCE_S),
)


def prompt(pages: int) -> Tokens:
    """The longer prompts continue the shorter ones; the last token is computed in any case."""
    return np.arange(pages * PAGE_TOKENS + 1, dtype=np.int32)


class Engine:
    """The caches of one engine, each served by a thread of its own, which steps all the time."""

    def __init__(self, config: CacheConfig) -> None:
        self._threads = ThreadPoolExecutor(RANKS)
        members = InProcessGroup(RANKS)
        opening_ = [
            self._threads.submit(Cache.open, config, members.member(rank)) for rank in range(RANKS)
        ]
        self.caches = [each.result() for each in opening_]
        self._number = 0

    def each(self, work: Callable[[Cache], T]) -> list[T]:
        """Return what `work` returns on each rank, whose thread does nothing else meanwhile."""
        return list(self._threads.map(work, self.caches))

    def until(self, done: Callable[[Cache], bool]) -> None:
        """Step, as an engine without requests does, until something is true on all ranks alike."""

        def step(cache: Cache) -> None:
            cache.step(idle_s=0.005)
            while not done(cache):
                cache.step(idle_s=0.005)

        self.each(step)

    def until_state(self, state: StoreState) -> None:
        self.until(lambda cache: cache.store_state() is state)

    def serve(self, pages: int) -> int:
        """Serve a prompt; return how many of its tokens came from the cache, and check their bytes."""
        self._number += 1
        name = f"r{self._number}"
        cached = self.each(lambda cache: serve(cache, name, prompt(pages)))
        assert cached[0] == cached[1]
        return cached[0]

    def close(self) -> None:
        self.each(lambda cache: cache.close(flush=False))
        self._threads.shutdown()


def serve(cache: Cache, name: str, tokens: Tokens) -> int:
    cache.prefetch(name, tokens[:-1])
    while not cache.prefetch_done(name):
        cache.step(idle_s=0.005)
    admission = cache.load_back(name, tokens[:-1], reserve_tokens=len(tokens))
    assert isinstance(admission, Admission)
    while cache.load_state(name) is LoadState.LOADING:
        cache.step(idle_s=0.005)
    contents = PageContents(shard_layouts(cache.config, cache.rank, RANKS)[KV_POOL])
    pages, cached = cache.page_table(name), admission.cached_tokens // PAGE_TOKENS
    count = len(tokens) // PAGE_TOKENS
    config = cache.inspection.config
    seed = namespace_seed(config.model_digest, "", 0, config.life)
    keys = page_keys(seed, tokens[:-1].tobytes(), PAGE_TOKENS)
    assert contents.verify(cache.device_pool, pages[:cached], keys[:cached]) == 0
    contents.fill(cache.device_pool, pages[cached:count], keys[cached:count])
    cache.insert(name, tokens[:-1])
    cache.release(name)
    assert cache.flush()
    return admission.cached_tokens


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Start engines of one pipeline depth, without a store unless one is named."""
    depth: int = request.param
    started: list[Engine] = []

    def start(store: str | None = None, **settings: object) -> Engine:
        config = replace(CONFIG, store=store, pipeline_depth=depth, **settings)  # type: ignore[arg-type]
        started.append(Engine(config))
        return started[-1]

    yield start
    for each in started:
        each.close()


def told(caches: Sequence[Cache], uri: str) -> "list[Future[None]]":
    return [cache.attach_store(uri) for cache in caches]


def test_a_store_that_is_attached_serves_what_was_computed_before_and_after(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}?durability=none"
    running = engine()
    assert running.serve(3) == 0
    assert running.each(lambda cache: cache.store_state()) == [StoreState.DETACHED] * RANKS

    outcomes = told(running.caches[::-1], uri)
    running.until_state(StoreState.ATTACHED)
    assert [outcome.result(PATIENCE_S) for outcome in outcomes] == [None] * RANKS
    assert running.serve(5) == 3 * PAGE_TOKENS

    fresh = engine(uri)
    assert fresh.serve(5) == 5 * PAGE_TOKENS
    assert all(cache.stats().bytes_moved.l3_to_l2 for cache in fresh.caches)


def test_a_uri_that_makes_no_sense_is_refused_at_once(engine: Callable[..., Engine]) -> None:
    """And nothing is pending then, so that the right one can be told next."""
    running = engine()

    with pytest.raises(ConfigError, match="unknown scheme 'fle'"):
        running.caches[0].attach_store("fle:///x")
    told(running.caches, "memory://attached-after-all")
    running.until_state(StoreState.ATTACHED)


def test_a_scheme_of_another_package_is_loaded_in_the_background(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import may take long, and may do anything."""
    threads: list[str] = []

    def make(uri: StoreUri) -> MemoryBackend:
        threads.append(threading.current_thread().name)
        raise ConfigError(f"store {uri.text!r}: no such tape")

    def loaded(uri: StoreUri, entry: EntryPoint) -> Callable[[StoreUri], MemoryBackend]:
        threads.append(threading.current_thread().name)
        return make

    def installed(*, group: str) -> EntryPoints:
        return EntryPoints([EntryPoint("tape", "tapes:make", group)])

    monkeypatch.setattr(registry, "entry_points", installed)
    monkeypatch.setattr(registry, "_loaded", loaded)
    running = engine()
    outcomes = told(running.caches, "tape://x")
    running.until(lambda cache: outcomes[cache.rank].done())

    assert set(threads) == {"lockstep-storage"}
    said = [str(outcome.exception(PATIENCE_S)) for outcome in outcomes]
    assert any("no such tape" in each for each in said)


def test_neither_logs_nor_refusals_repeat_a_store_s_secrets(
    engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lockstep")
    running = engine()
    uri = "peer://127.0.0.1:1?secret=s3kr1t-s3kr1t-s3kr1t"
    outcomes = told(running.caches, uri)
    with pytest.raises(UsageError) as refused:
        running.caches[0].attach_store("memory://another")
    running.until(lambda cache: outcomes[cache.rank].done())
    said = [str(outcome.exception(PATIENCE_S)) for outcome in outcomes]

    assert any("secret=***" in each for each in said)
    assert "is withdrawn" in caplog.text
    assert "s3kr1t" not in " ".join([*said, caplog.text, str(refused.value)])
