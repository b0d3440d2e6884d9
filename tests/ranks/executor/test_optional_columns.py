"""Optional columns (rule R5): engines with and without a draft model share one store."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep import Cache, CacheConfig, Column, ConfigError, PageLayout, StopPolicy, StopRule
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.page_format.page_layout import OPTIONAL_COLUMNS_MAX, ShardLayout
from lockstep.ranks.protocol.agreed_pools import shard_layouts
from lockstep.ranks.protocol.config import SlidingWindow
from lockstep.ranks.protocol.model_description import KeptState, ModelDescription
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.storage_backends.base import StoredObject
from lockstep.storage_backends.records.catalogue import full_shape, tp_size_of
from lockstep.storage_backends.wrappers.base import Call
from tests.kit.ranks.executor_parts import (
    key_outcomes,
)
from tests.kit.ranks.served_group import ServedGroup, served

RANKS = 2
PAGES = 12
PAGE_TOKENS = 4
TOKENS = np.arange(PAGES * PAGE_TOKENS + 1, dtype=np.int32)
KEPT = (
    Column(name="k", layers=2, heads=4, elements=6),
    Column(name="index", layers=2, heads=1, elements=4, dtype="float32", replicated=True),
)
DRAFT_K = Column(name="draft_k", layers=1, heads=2, elements=6, optional=True)
DRAFT_V = replace(DRAFT_K, name="draft_v")
DRAFT = ("draft_k", "draft_v")
LAYOUT = PageLayout(page_tokens=PAGE_TOKENS, columns=(*KEPT, DRAFT_K, DRAFT_V))
FULL = CacheConfig(
    model="m",
    layout=LAYOUT,
    device_pages=2 * PAGES,
    host_pages=4 * PAGES,
    stop_policy=StopPolicy(rule=StopRule.WAIT_COMPLETE),
)
LEAN = replace(FULL, absent_columns=DRAFT)


Start = Callable[[CacheConfig], ServedGroup]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Start]:
    started: list[ServedGroup] = []

    def start(config: CacheConfig) -> ServedGroup:
        at = f"file://{tmp_path}?durability=none"
        started.append(ServedGroup(replace(config, store=at), RANKS))
        return started[-1]

    yield start
    for group in started:
        group.close()


def serve(cache: Cache) -> tuple[int, int]:
    return served(cache, "request", TOKENS)


ALL_OF_IT, NOTHING = (PAGES * PAGE_TOKENS, 0), (0, 0)


def test_engines_with_and_without_a_draft_model_share_one_store(
    engine: Start,
) -> None:
    """Each engine starts with empty memory, so every hit comes from the store."""
    without = engine(LEAN)
    computed = without.ask(serve)
    with_draft = engine(FULL)
    missed = with_draft.ask(serve)
    found = [engine(FULL).ask(serve), engine(LEAN).ask(serve)]

    assert (computed, missed) == (NOTHING, NOTHING)
    assert found == [ALL_OF_IT, ALL_OF_IT]
    executors = [cache.inspection.executor for cache in with_draft.caches]
    # At least one rank reports a missing page. If this report cancels another rank's read, the other
    # rank reports none.
    assert sum(key_outcomes(each, Call.READ)["lacking"] for each in executors) > 0
    assert not any(each.counts().pages_corrupt for each in executors)
    # Nothing that this engine wrote was in the store already, except perhaps its group's mark.
    assert all(key_outcomes(each, Call.WRITE)["present"] <= 1 for each in executors)


@pytest.mark.parametrize("name", ["k", "drafts"])
def test_only_an_optional_column_can_be_absent(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"'{name}', which is not an optional .*: draft_k, draft_v"
    ):
        replace(FULL, absent_columns=("draft_k", name))


def test_a_column_of_any_pool_can_be_absent() -> None:
    window = SlidingWindow(
        window_tokens=8,
        layout=PageLayout(
            page_tokens=PAGE_TOKENS, columns=(KEPT[0], replace(DRAFT_K, name="eagle"))
        ),
        device_pages=8,
        host_pages=8,
    )

    config = replace(FULL, components=(window,), absent_columns=("eagle",))

    shards = shard_layouts(config, 0, RANKS)
    assert {pool: shard.shape.present for pool, shard in shards.items()} == {
        "kv": 0b11,
        "window": 0,
    }


@pytest.mark.parametrize("pool", ["manifest", "sharding"])
def test_no_component_s_pool_is_called_like_those_of_a_store_s_records(pool: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be called '{pool}'.* not .*'{pool}'"):
        SlidingWindow(window_tokens=8, layout=LAYOUT, device_pages=8, host_pages=8, pool=pool)


def test_a_model_that_keeps_what_its_cache_does_not_is_refused() -> None:
    def described(*names: str) -> ModelDescription:
        kept = KeptState(kind="full_attention", layers=2, columns=names)
        return ModelDescription(model="m", keeps=(kept,))

    replace(LEAN, description=described("k", "index"))
    with pytest.raises(ConfigError, match="no column 'draft_k'"):
        replace(LEAN, description=described("k", "index", "draft_k"))


def shard(
    *absent: str, ranks: int = RANKS, columns: tuple[Column, ...] = LAYOUT.columns
) -> ShardLayout:
    layout = PageLayout(page_tokens=PAGE_TOKENS, columns=columns)
    return layout.shard(1, ranks, absent=absent)


def test_an_object_has_the_same_name_whichever_columns_are_kept() -> None:
    deep = replace(DRAFT_K, layers=9)
    latent = replace(KEPT[1], heads=1)

    assert shard(*DRAFT).name == shard().name == "l0-2.h2-4"
    assert shard("draft_k", columns=(KEPT[0], deep)).name == "l0-9.h2-4"
    assert shard("draft_k", columns=(latent, DRAFT_K)).name == "l0-2.h1-2"
    assert not shard("draft_k", columns=(latent, DRAFT_K)).replicated


@pytest.mark.parametrize("first", [KEPT[0], KEPT[1]], ids=["divided", "all alike"])
@pytest.mark.parametrize(
    ("draft", "absent"),
    [(replace(DRAFT_K, layers=2, heads=4), []), (replace(DRAFT_K, heads=1), ["draft_k"])],
    ids=["every column", "no draft"],
)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, 1), (2, 2), (4, 2)])
def test_what_the_store_command_tells_needs_no_group_that_keeps_every_column(
    ranks: int, stages: int, first: Column, draft: Column, absent: list[str]
) -> None:
    layout = PageLayout(page_tokens=PAGE_TOKENS, columns=(first, draft))
    lean = [layout.shard(rank, ranks, absent=absent, stages=stages) for rank in range(ranks)]

    assert [full_shape(layout, written_by(shard)) for shard in lean] == [
        shard.shape for shard in lean
    ]
    everybody = ranks == stages or first.replicated
    assert everybody or {tp_size_of(layout, shard.name) for shard in lean} == {ranks // stages}


def written_by(shard: ShardLayout) -> StoredObject:
    """Return an object as a store lists it, with only the parts that its writer holds."""
    parts = tuple(shard.shape.parts[number] for number in shard.shape.held)
    written = ObjectShape(parts, tuple(range(len(parts))))
    name = ObjectName("ab", "cd", KV_POOL, shard.name)
    return StoredObject(name=name, shape=written, age_s=None)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (
            (KEPT[0], DRAFT_K, KEPT[1]),
            "must come last in a page, but 'index' follows 'draft_k'; move 'draft_k' to the end",
        ),
        ((DRAFT_K, DRAFT_V), r"all columns are optional \(draft_k, draft_v\); a page layout needs"),
        (
            (*KEPT, *(replace(DRAFT_K, name=f"d{n}") for n in range(OPTIONAL_COLUMNS_MAX + 1))),
            "17 columns are optional, must be at most 16",
        ),
    ],
    ids=["order", "nothing else", "too many"],
)
def test_optional_columns_that_cannot_be_are_refused(
    columns: tuple[Column, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PageLayout(page_tokens=PAGE_TOKENS, columns=columns)
