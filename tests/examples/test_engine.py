"""The example engine produces the same tokens from every tier, and after every fault."""

import math
import re
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import Engine, Request
from tiny_transformer import Shape, TinyTransformer
from tour import OUTPUTS, Scene, config, prompt, serve, without_cache

from lockstep import Cache, LoadState, WritePolicy
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.ranks.executor.copies import CopyJob, Pages, page_pairs
from lockstep.ranks.executor.pools import TierPools
from lockstep.ranks.protocol.orders import CopyTransfer
from tests.kit.launch.replays import TORCHRUN, Ended, run
from tests.kit.source_tree import ROOT

RUN = ROOT / "examples" / "engine" / "start.py"
SHAPE = Shape()
MODEL = TinyTransformer(SHAPE)
MANY = [0, 1, 2, 3, 0, 0]
ROW = re.compile(
    r"^(.*?) {2,}(\d+) +(\d+) +(\d+) +(\d+) +(\d+)  (WRONG|as without a cache)", re.MULTILINE
)


@contextmanager
def opened(store: str | None = None, **settings: Any) -> Generator[Cache]:
    """Yield a cache of one rank whose device pages hold NaN until they are written."""
    changed = replace(config(SHAPE, "memory://"), store=store, **settings)
    cache = Cache.open(changed, InProcessGroup(1).member(0))
    for column in changed.layout.columns:
        cache.device_pool.column(column.name).fill_(math.nan)
    yield cache
    cache.close()


def rows(ended: Ended) -> list[tuple[str, ...]]:
    """Return the rows of the example's table: a name, five token counts, and a comparison."""
    assert ended.status == 0, ended.err[-2000:]
    return ROW.findall(ended.out)


def answer(ended: Ended) -> str:
    return ended.out.splitlines()[-1]


SERVED = [
    ("again", "129", "1", "128", "0", "0"),
    ("again, off the device", "129", "1", "32", "96", "0"),
    ("again, off the host", "129", "1", "32", "0", "96"),
    ("after a restart", "129", "1", "0", "0", "128"),
]
COLD, FOUND = (
    ("first time", "129", "129", "0", "0", "0"),
    ("first time", "129", "1", "0", "0", "128"),
)


@pytest.mark.distributed
def test_two_ranks_and_then_one_give_the_same_tokens_from_every_tier(tmp_path: Path) -> None:
    store = ("--store", f"file://{tmp_path}/kv")

    two = run(*TORCHRUN, "--standalone", "--nproc-per-node", 2, RUN, *store)
    one = run(sys.executable, RUN, *store)

    right = "as without a cache"
    assert {row[-1] for row in [*rows(two), *rows(one)]} == {right}
    assert [row[:-1] for row in rows(two) if row[:-1] in (COLD, *SERVED)] == [COLD, *SERVED]
    assert [row[:-1] for row in rows(one) if row[:-1] in (FOUND, *SERVED)] == [FOUND, *SERVED]
    assert re.search(r"\d+ resumed; \d+ retracted", two.out)
    assert answer(two) == answer(one)


def chunked(chunk_tokens: int) -> list[int]:
    with opened() as cache:
        engine = Engine(cache, MODEL, chunk_tokens=chunk_tokens)
        engine.submit(Request(name="r", tokens=prompt(0), last=len(prompt(0)) + OUTPUTS))
        engine.run()
        return engine.served["r"].tokens[-OUTPUTS:]


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_chunks_of_any_size_give_the_same_tokens(chunk_tokens: int) -> None:
    assert chunked(chunk_tokens) == without_cache(SHAPE, 0)


def spoiled(page: int, with_page: int | None) -> Scene:
    """Overwrite a prompt's cached page `page` by page `with_page` (None: by NaN); serve the prompt."""
    with opened() as cache:
        serve("before", cache, MODEL, [0])
        cache.load_back("looks", prompt(0)[:-1])
        pages = cache.page_table("looks")
        cache.release("looks")
        for name in ("k", "v"):
            column = cache.device_pool.column(name)
            wrong = math.nan if with_page is None else column[:, pages[with_page]].clone()
            column[:, pages[page]] = wrong
        return serve("after", cache, MODEL, [0])


@pytest.mark.parametrize("page", [0, 7])
@pytest.mark.parametrize("with_page", [None, 3])
def test_a_page_with_other_content_changes_the_tokens(page: int, with_page: int | None) -> None:
    """A wrong page always changes the tokens, so equal tokens prove that every page was right."""
    scene = spoiled(page, with_page)

    assert (scene.computed, scene.equal) == (1, False)


@pytest.mark.parametrize("policy", WritePolicy)
def test_under_every_write_policy_requests_make_room_and_come_back(policy: WritePolicy) -> None:
    with opened(write_policy=policy) as cache:
        scene = serve("many", cache, MODEL, MANY)

    assert scene.equal
    assert scene.events["retracted"] == scene.events["resumed"] > 0


def test_a_prompt_that_comes_twice_is_loaded_once() -> None:
    with opened() as cache:
        serve("before", cache, MODEL, [0])
        serve("others", cache, MODEL, [1, 2, 3])
        scene = serve("twice", cache, MODEL, [0, 0])

    assert scene.equal
    assert (scene.host, scene.computed) == (96, 2)
    assert scene.events["wait: loading"] > 0


def test_without_host_memory_a_request_that_makes_room_begins_again() -> None:
    with opened(host_pages=0) as cache:
        scene = serve("many", cache, MODEL, MANY)

    assert scene.equal
    assert scene.events["begun again"] > 0


def fail_every_third(job: CopyJob, transfer: CopyTransfer, pools: TierPools) -> tuple[Pages, Pages]:
    """Fail the copies of every third operation before any page is copied."""
    if job.operation % 3 == 0:
        raise OSError("the cable was out")
    return page_pairs(job, transfer, pools)


def test_copies_that_fail_cost_work_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.ranks.executor.copies.page_pairs", fail_every_third)
    with opened() as cache:
        scenes = [serve(f"many {again}", cache, MODEL, MANY) for again in range(2)]

    assert [scene.equal for scene in scenes] == [True] * 2
    happened = sum((scene.events for scene in scenes), Counter[str]())
    assert happened["failed"] > 0


def test_pages_that_storage_has_damaged_are_computed_again(tmp_path: Path) -> None:
    store = f"fault+file://{tmp_path}/kv?fault.seed=1&fault.flip=0.2"
    with opened(store) as cache:
        serve("before", cache, MODEL, MANY)

    with opened(store) as cache:
        scene = serve("after", cache, MODEL, MANY)
        corrupt = cache.stats().pages_corrupt

    assert scene.equal
    assert scene.storage > 0
    assert corrupt > 0


def until(engine: Engine, cache: Cache, name: str, state: LoadState) -> None:
    names = [each.name for each in engine.admitted]
    while name not in names or cache.load_state(name) is not state:
        engine.step()
        names = [each.name for each in engine.admitted]


def test_a_request_can_be_dropped_wherever_it_is() -> None:
    with opened() as cache:
        serve("before", cache, MODEL, [0])
        engine = Engine(cache, MODEL)
        for at, number in enumerate([1, 2, 3, 4, 5]):
            engine.submit(Request(name=f"r{at}", tokens=prompt(number), last=129 + OUTPUTS))
        engine.abort("r4")
        until(engine, cache, "r2", LoadState.SAVED)
        engine.abort("r2")
        engine.abort("r0")
        engine.run()
        cache.flush()
        cache.inspection.check()
        served = {name: each.tokens[-OUTPUTS:] for name, each in engine.served.items()}

    assert served == {"r1": without_cache(SHAPE, 2), "r3": without_cache(SHAPE, 4)}


def test_a_request_that_no_device_could_hold_is_refused() -> None:
    with opened() as cache:
        engine = Engine(cache, MODEL)

        with pytest.raises(ValueError, match="needs 25 device pages"):
            engine.submit(Request(name="r", tokens=[1], last=16 * 24 + 1))
