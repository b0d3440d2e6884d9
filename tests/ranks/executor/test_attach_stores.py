"""Attach and detach stores under running engines: real caches, real stores (rule R14)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

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
from lockstep.ranks.replica.attaching import StoreState
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.uri import StoreUri
from tests.kit.ranks.executor_parts import PATIENCE_S
from tests.kit.ranks.served_group import ServedGroup, served

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


def prompt(pages: int) -> npt.NDArray[np.int32]:
    """Return a prompt of `pages` pages and one token; a longer prompt starts with every shorter one."""
    return np.arange(pages * PAGE_TOKENS + 1, dtype=np.int32)


class Engine(ServedGroup):
    def until_state(self, state: StoreState) -> None:
        self.until(lambda cache: cache.store_state() is state)

    def serve(self, name: str, pages: int) -> int:
        """Serve a prompt; check the bytes of its cached pages and return its cached tokens."""
        cached, wrong_pages = self.ask(lambda cache: served(cache, name, prompt(pages)))
        assert not wrong_pages
        return cached


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts engines of one pipeline depth, by default without a store."""
    depth: int = request.param
    started: list[Engine] = []

    def start(store: str | None = None, **settings: object) -> Engine:
        config = replace(CONFIG, store=store, pipeline_depth=depth, **settings)  # type: ignore[arg-type]
        started.append(Engine(config, RANKS))
        return started[-1]

    yield start
    for each in started:
        each.close()


def attach_store(caches: Sequence[Cache], uri: str) -> "list[Future[None]]":
    return [cache.attach_store(uri) for cache in caches]


def test_a_store_that_is_attached_serves_what_was_computed_before_and_after(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}?durability=none"
    running = engine()
    assert running.serve("before", 3) == 0
    assert running.ask(lambda cache: cache.store_state()) is StoreState.DETACHED

    outcomes = attach_store(running.caches[::-1], uri)
    running.until_state(StoreState.ATTACHED)
    assert [outcome.result(PATIENCE_S) for outcome in outcomes] == [None] * RANKS
    assert running.serve("after", 5) == 3 * PAGE_TOKENS

    fresh = engine(uri)
    assert fresh.serve("later", 5) == 5 * PAGE_TOKENS
    assert all(cache.stats().bytes_moved.l3_to_l2 for cache in fresh.caches)


def test_a_uri_that_makes_no_sense_is_refused_at_once(engine: Callable[..., Engine]) -> None:
    """An invalid URI is refused at once and leaves nothing pending: another can be attached next."""
    running = engine()

    with pytest.raises(ConfigError, match="unknown scheme 'fle'"):
        running.caches[0].attach_store("fle:///x")
    attach_store(running.caches, "memory://attached-after-all")
    running.until_state(StoreState.ATTACHED)


def test_a_scheme_of_another_package_is_loaded_in_the_background(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third-party client is imported in a background thread, because its import may block."""
    threads: list[str] = []

    def make(uri: StoreUri) -> MemoryBackend:
        threads.append(threading.current_thread().name)
        raise ConfigError(f"store {uri.text!r}: no such tape")

    class Tapes(EntryPoint):
        def load(self) -> Any:
            threads.append(threading.current_thread().name)
            return make

    def installed(*, group: str) -> EntryPoints:
        return EntryPoints([Tapes("tape", "tapes:make", group)])

    monkeypatch.setattr("importlib.metadata.entry_points", installed)
    running = engine()
    outcomes = attach_store(running.caches, "tape://x")
    running.until(lambda cache: outcomes[cache.rank].done())

    assert set(threads) == {"lockstep-storage"}
    errors = [str(outcome.exception(PATIENCE_S)) for outcome in outcomes]
    assert any("no such tape" in each for each in errors)


def test_neither_logs_nor_refusals_repeat_a_store_s_secrets(
    engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lockstep")
    running = engine()
    uri = "peer://127.0.0.1:1?secret=s3kr1t-s3kr1t-s3kr1t"
    outcomes = attach_store(running.caches, uri)
    with pytest.raises(UsageError) as refused:
        running.caches[0].attach_store("memory://another")
    running.until(lambda cache: outcomes[cache.rank].done())
    errors = [str(outcome.exception(PATIENCE_S)) for outcome in outcomes]

    assert any("secret=***" in each for each in errors)
    assert "is withdrawn" in caplog.text
    assert "s3kr1t" not in " ".join([*errors, caplog.text, str(refused.value)])
