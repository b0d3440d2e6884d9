"""Lockstep's stores under HiCache, with torch host pools and real stores, without SGLang."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.hicache.calls import HiCacheCalls
from lockstep.integrations.sglang.hicache.pages import COPIED_AT_A_TIME, PoolPages
from lockstep.integrations.sglang.hicache.prefixes import LookupResult
from tests.kit.sglang.host_pools import (
    Anchor,
    LayerFirst,
    PageFirst,
    Standing,
    Wanted,
    filled,
    keys_of,
    opened,
    same_bytes,
    slots_of,
)

Opens = Callable[..., HiCacheCalls]

KEYS = keys_of(4)


@pytest.fixture
def opens() -> Iterator[Opens]:
    with ExitStack() as stack:

        def opens(*arguments: Any, **options: Any) -> HiCacheCalls:
            return stack.enter_context(closing(opened(*arguments, **options)))

        yield opens


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def objects_in(tmp_path: Path) -> list[Path]:
    return sorted(each for each in (tmp_path / "store" / "objects").rglob("*") if each.is_file())


@pytest.mark.parametrize("layout", [PageFirst, LayerFirst])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_come_back_byte_for_byte_in_other_slots(
    opens: Opens, store: str, layout: type[PageFirst], dtype: torch.dtype
) -> None:
    ours, theirs = filled(layout(dtype=dtype)), layout(dtype=dtype)

    written = opens(store, ours).write("kv", KEYS, slots_of(ours, 0, 1, 2, 3))
    read = opens(store, theirs).read("kv", KEYS, slots_of(theirs, 7, 5, 4, 6))

    assert written == read == [True] * 4
    assert [
        same_bytes(ours.page(ours.page_size * one), theirs.page(theirs.page_size * two))
        for one, two in [(0, 7), (1, 5), (2, 4), (3, 6)]
    ] == [True] * 4


def test_flat_pages_and_pages_in_place_are_the_same_objects(opens: Opens, store: str) -> None:
    ours, theirs = filled(PageFirst()), PageFirst()
    target = theirs.get_dummy_flat_data_page()

    written = opens(store, ours).write("kv", KEYS[:1], slots_of(ours, 0))
    read = opens(store, theirs).read_flat(KEYS[:1], [target])

    assert written == read == [True]
    assert same_bytes(target, ours.get_data_page(0))


def test_a_page_that_lies_whole_is_moved_without_a_copy() -> None:
    pool = PageFirst()

    (batch,) = PoolPages("kv", pool).batches(slots_of(pool, 3), read=True)
    for piece in batch.buffers[0]:
        piece[:] = b"\x01" * len(piece)

    assert pool.page(12).view(torch.uint8).eq(1).all()
    assert pool.kv.view(torch.uint8).sum() == pool.page(12).nbytes


def test_pages_that_must_be_copied_are_copied_a_few_at_a_time() -> None:
    pool = LayerFirst()
    pages = PoolPages("kv", pool)
    pages.page_bytes = COPIED_AT_A_TIME // 3

    batches = pages.batches(slots_of(pool, *range(8)), read=False)

    assert [(each.first, len(each.buffers)) for each in batches] == [(0, 3), (3, 3), (6, 2)]


def test_a_pool_without_bytes_keeps_the_presence_of_its_pages(opens: Opens, store: str) -> None:
    ours, theirs = Anchor(), Anchor()

    written = opens(store, ours).write("kv", KEYS[:2], slots_of(ours, 0, 1))
    calls = opens(store, theirs)

    assert written == [True, True]
    assert calls.leading(KEYS) == 2
    assert calls.read("kv", KEYS[:3], slots_of(theirs, 0, 1, 2)) == [True, True, False]


def test_a_damaged_object_is_a_miss_and_can_be_written_again(
    opens: Opens, store: str, tmp_path: Path
) -> None:
    pool = filled(LayerFirst())
    calls = opens(store, pool)
    calls.write("kv", KEYS[:1], slots_of(pool, 0))
    (only,) = objects_in(tmp_path)
    damaged = bytearray(only.read_bytes())
    damaged[-1] ^= 1
    only.write_bytes(damaged)
    later = opens(store, LayerFirst())

    assert later.read("kv", KEYS[:1], slots_of(pool, 0)) == [False]
    assert calls.write("kv", KEYS[:1], slots_of(pool, 0)) == [True]
    assert later.read("kv", KEYS[:1], slots_of(pool, 0)) == [True]


def test_what_was_not_read_does_not_touch_a_pool_that_is_copied_to(
    opens: Opens, store: str
) -> None:
    pool = filled(LayerFirst())
    before = pool.kv.clone()

    assert opens(store, pool).read("kv", KEYS, slots_of(pool, 0, 1, 2, 3)) == [False] * 4
    assert same_bytes(pool.kv, before)


BESIDE: dict[str, tuple[Wanted, list[int], LookupResult]] = {
    "a state ends it": (
        Wanted("mamba", keys_of(1), "trailing_pages"),
        [1, 4],
        LookupResult(5, {"kv": 6, "mamba": 5}, [2, 5]),
    ),
    "a window of two pages, or the whole prefix": (
        Wanted("swa", keys_of(2), "trailing_pages"),
        [0, 2, 3, 5],
        LookupResult(4, {"kv": 6, "swa": 4}, [1, 4]),
    ),
    "every page of an index": (
        Wanted("indexer"),
        [0, 1, 3],
        LookupResult(2, {"kv": 4, "indexer": 2}, [1, 2]),
    ),
    "blocks say how far they reach, and shorten nothing": (
        Wanted("blocks", None, "block_groups", block_pages=2, group_pages=1),
        [1, 5],
        LookupResult(7, {"kv": 7, "blocks": 2}, [1, 2, 3, 4, 5, 6, 7]),
    ),
}


@pytest.mark.parametrize(("wanted", "there", "found"), BESIDE.values(), ids=BESIDE)
def test_a_prefix_is_restorable_where_the_pool_beside_it_has_what_its_policy_asks_for(
    opens: Opens, store: str, wanted: Wanted, there: list[int], found: LookupResult
) -> None:
    count = found.pool_pages["kv"]
    keys, pool, beside = keys_of(count), filled(PageFirst()), filled(PageFirst(page_size=1))
    calls = opens(store, pool)
    calls.add_pool(wanted.name, beside)
    calls.write("kv", keys, slots_of(pool, *range(count)))
    calls.write(wanted.name, [keys[at] for at in there], slots_of(beside, *range(len(there))))

    assert calls.find(keys, [wanted]) == found


def test_a_pool_that_nobody_registered_has_no_pages(opens: Opens, store: str) -> None:
    pool = filled(PageFirst())
    calls = opens(store, pool)
    calls.write("kv", KEYS, slots_of(pool, 0, 1, 2, 3))

    assert calls.find(KEYS, [Wanted("indexer", KEYS)]).pages == 0
    assert calls.read("indexer", KEYS, slots_of(pool, 0, 1, 2, 3)) == [False] * 4


OTHERS: dict[str, tuple[Standing, PageFirst, dict[str, str], dict[str, str]]] = {
    "model": (Standing(model_name="another"), PageFirst(), {}, {}),
    "rank": (Standing(tp_rank=1), PageFirst(), {}, {}),
    "size": (Standing(tp_size=4), PageFirst(), {}, {}),
    "stage": (Standing(pp_rank=1, pp_size=2), PageFirst(), {}, {}),
    "context": (Standing(attn_cp_rank=1, attn_cp_size=2), PageFirst(), {}, {}),
    "type": (Standing(), PageFirst(dtype=torch.int32), {}, {}),
    "layout": (Standing(), LayerFirst(), {}, {}),
    "page": (Standing(), PageFirst(page_size=8), {}, {}),
    "weights": (Standing(), PageFirst(), {}, {"weights_version": "2"}),
    "format": (Standing(), PageFirst(), {"kv_cache_dtype": "'fp8_e5m2'"}, {}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_pages_of_another_kind_are_never_taken_for_ours(
    opens: Opens, store: str, what: str
) -> None:
    standing, theirs, facts, extra = OTHERS[what]
    ours = filled(PageFirst())
    opens(store, ours).write("kv", KEYS, slots_of(ours, 0, 1, 2, 3))

    calls = opens(store, theirs, replace(standing), facts, **extra)

    assert calls.leading(KEYS) == 0
    assert calls.read("kv", KEYS, slots_of(theirs, 0, 1, 2, 3)) == [False] * 4


def test_latent_pages_of_one_rank_serve_all_ranks_and_its_states_do_not(
    opens: Opens, store: str
) -> None:
    pool, states = filled(PageFirst()), filled(PageFirst(page_size=1))
    first = opens(store, pool, Standing(is_mla_model=True))
    second = opens(store, PageFirst(), Standing(is_mla_model=True, tp_rank=1))
    first.add_pool("mamba", states)
    second.add_pool("mamba", PageFirst(page_size=1))
    first.write("kv", KEYS, slots_of(pool, 0, 1, 2, 3))
    first.write("mamba", KEYS[3:], slots_of(states, 3))

    assert second.leading(KEYS) == 4
    assert second.find(KEYS, [Wanted("mamba", KEYS[3:], "trailing_pages")]).restorable == []


def test_keys_and_slots_that_do_not_fit_are_refused_page_by_page(opens: Opens, store: str) -> None:
    pool = filled(PageFirst())
    calls = opens(store, pool)

    assert calls.write("kv", KEYS, slots_of(pool, 0, 1)) == [False] * 4
    assert calls.write("kv", KEYS, None) == [False] * 4
    assert calls.write_flat(KEYS, [pool.get_data_page(0)]) == [False] * 4
    assert calls.read_flat(KEYS[:1], [torch.zeros(3)]) == [False]
    assert calls.leading(KEYS) == 0


def test_a_store_that_fails_gives_misses_and_says_so_once(
    opens: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    pool = filled(PageFirst())
    calls = opens("fault+memory://?fault.error=1", pool)
    slots = slots_of(pool, 0, 1, 2, 3)

    with caplog.at_level(logging.WARNING, "lockstep.integrations"):
        outcomes = [calls.write("kv", KEYS, slots) for _ in range(3)]
        outcomes += [calls.read("kv", KEYS, slots) for _ in range(3)]

    assert outcomes == [[False] * 4] * 6
    assert calls.leading(KEYS) == 0
    assert [record.message.partition(" in the store")[0] for record in caplog.records] == [
        "HiCache's pages cannot be written",
        "HiCache's pages cannot be read",
    ]


def test_clear_takes_our_pages_and_leaves_what_others_have(opens: Opens, store: str) -> None:
    pool = filled(PageFirst())
    slots = slots_of(pool, 0, 1, 2, 3)
    ours = opens(store, pool)
    others = opens(store, pool, Standing(tp_rank=1)), opens(store, pool, weights_version="2")
    written = [each.write("kv", KEYS, slots) for each in (ours, *others)]

    assert ours.clear()

    assert written == [[True] * 4] * 3
    assert ours.leading(KEYS) == 0
    assert [each.leading(KEYS) for each in others] == [4, 4]


def test_calls_are_counted_for_the_engine_only_where_it_asks(opens: Opens, store: str) -> None:
    pool = filled(PageFirst())
    slots = slots_of(pool, 0, 1, 2, 3)
    calls = opens(store, pool, Standing(enable_storage_metrics=True))
    silent = opens(store, pool)
    calls.write("kv", KEYS, slots)
    calls.read("kv", KEYS, slots)
    silent.read("kv", KEYS, slots)

    read, written = calls.take_moved()

    assert [each.pages for each in read] == [each.pages for each in written] == [4]
    assert read[0].gb_per_s > 0
    assert calls.take_moved() == silent.take_moved() == ([], [])


@pytest.mark.parametrize(
    ("standing", "extra", "message"),
    [
        (Standing(), {"shop": "file:///kv"}, "there is no key 'shop'; known: clear_timeout_s, "),
        (Standing(), {"store": "ftp://x"}, "unknown scheme 'ftp'"),
        (Standing(), {"store": "memory://", "read_timeout_s": 0}, "must be more than 0"),
        (Standing(dcp_size=2), {"store": "memory://"}, "decode context parallelism"),
        (Standing(tp_lcm_size=4), {"store": "memory://"}, "tp_lcm_size; remove them"),
    ],
)
def test_a_wrong_configuration_is_named_before_anything_is_opened(
    standing: Standing, extra: dict[str, Any], message: str
) -> None:
    standing.extra_config = {"backend_name": "lockstep", "interface_v1": 1, **extra}

    with pytest.raises(ConfigError, match=message):
        HiCacheCalls(standing, {})


def test_a_pool_whose_pages_cannot_be_had_is_refused_by_its_layout() -> None:
    class Unified(PageFirst):
        layout = "page_unified"

        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            raise ValueError("Unsupported layout")

    with pytest.raises(ConfigError, match="'page_unified', which gives no access"):
        PoolPages("kv", Unified())
