"""Namespaces and manifests: pages are shared only if everything that affects the KV agrees."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.page_format.namespace import Namespace
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.storage_backends.base import StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.records.manifest import MANIFEST_BYTES, Manifest, claim_model
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.wrappers.base import Wrapper
from lockstep.storage_backends.wrappers.claimed import ClaimedBackend
from tests.kit.storage.calls import opened, run, soon, soon_off_loop, writing
from tests.kit.storage.files import FileStore

KEYS = Column(name="k", layers=4, heads=8, elements=64)
VALUES = Column(name="v", layers=4, heads=8, elements=64)
LAYOUT = PageLayout(page_tokens=16, columns=(KEYS, VALUES))
KV_ONLY = {"kv": LAYOUT}
INDEX = Column(
    name="index", layers=4, heads=1, elements=128, dtype="float8_e4m3fn", replicated=True
)

OTHER_LAYOUTS: dict[str, tuple[PageLayout, str]] = {
    "page size": (
        replace(LAYOUT, page_tokens=64),
        "page_tokens is 16 in the store and 64 here; use another store, or pages of 16 tokens",
    ),
    "one column more": (
        replace(LAYOUT, columns=(KEYS, VALUES, INDEX)),
        "the columns are k, v in the store and k, v, index here; use another store",
    ),
    "order": (
        replace(LAYOUT, columns=(VALUES, KEYS)),
        "the columns are k, v in the store and v, k here",
    ),
    "layers": (
        replace(LAYOUT, columns=(KEYS, replace(VALUES, layers=5))),
        "layers of column 'v' is 4 in the store and 5 here; use another store",
    ),
    "heads": (
        replace(LAYOUT, columns=(replace(KEYS, heads=4), VALUES)),
        "heads of column 'k' is 8 in the store and 4 here",
    ),
    "elements": (
        replace(LAYOUT, columns=(replace(KEYS, elements=32), VALUES)),
        "elements of column 'k' is 64 in the store and 32 here",
    ),
    "dtype": (
        replace(LAYOUT, columns=(replace(KEYS, dtype="int8"), VALUES)),
        "dtype of column 'k' is bfloat16 in the store and int8 here",
    ),
    "optional": (
        replace(LAYOUT, columns=(KEYS, replace(VALUES, optional=True))),
        "optional of column 'v' is False in the store and True here; use another store",
    ),
    "replicated": (
        replace(LAYOUT, columns=(replace(KEYS, replicated=True), VALUES)),
        "replicated of column 'k' is False in the store and True here",
    ),
}

WINDOW = PageLayout(page_tokens=16, columns=(replace(KEYS, layers=9), replace(VALUES, layers=9)))
STATE = PageLayout(page_tokens=1, columns=(Column(name="conv", layers=6, heads=8, elements=96),))
HYBRID = {"kv": LAYOUT, "window": WINDOW, "state": STATE}

OTHER_POOLS: dict[str, tuple[dict[str, PageLayout], str]] = {
    "one pool less": (
        {"kv": LAYOUT, "window": WINDOW},
        "the store keeps the pool 'state', which is not configured here; use another store",
    ),
    "one pool more": (
        HYBRID | {"draft": WINDOW},
        "the store does not keep the pool 'draft', which is configured here; use another store",
    ),
    "another layout": (
        HYBRID | {"window": replace(WINDOW, columns=(KEYS, VALUES))},
        "pool 'window': layers of column 'k' is 9 in the store and 4 here",
    ),
}


@pytest.mark.parametrize(
    ("pools", "other", "complaint"),
    [
        *((KV_ONLY, {"kv": layout}, complaint) for layout, complaint in OTHER_LAYOUTS.values()),
        *((HYBRID, pools, complaint) for pools, complaint in OTHER_POOLS.values()),
    ],
    ids=[*OTHER_LAYOUTS, *OTHER_POOLS],
)
async def test_the_same_model_in_another_layout_is_refused_with_both_values(
    store: FileStore, pools: dict[str, PageLayout], other: dict[str, PageLayout], complaint: str
) -> None:
    async with opened(store) as first, opened(store) as second:
        await claim_model(first, "m", "1", pools, soon())
        await claim_model(second, "m", "1", dict(reversed(pools.items())), soon())
        with pytest.raises(ConfigError) as raised:
            await claim_model(second, "m", "1", other, soon())
        assert "model 'm' with weights version '1'" in str(raised.value)
        assert complaint in str(raised.value)


async def test_a_store_holds_other_models_and_weights_in_their_own_layouts(
    store: FileStore,
) -> None:
    async with opened(store) as backend:
        await claim_model(backend, "m", "1", KV_ONLY, soon())
        await claim_model(backend, "m", "2", {"kv": replace(LAYOUT, page_tokens=32)}, soon())
        await claim_model(backend, "n", "1", {"kv": replace(LAYOUT, page_tokens=64)}, soon())


async def test_of_concurrent_claims_with_two_layouts_one_layout_wins(store: FileStore) -> None:
    layouts = [KV_ONLY, {"kv": replace(LAYOUT, page_tokens=64)}] * 4

    async with opened(store) as first, opened(store) as second:
        results = [
            await asyncio.gather(
                *(
                    claim_model((first, second)[each % 2], "m", str(number), layout, soon())
                    for each, layout in enumerate(layouts)
                ),
                return_exceptions=True,
            )
            for number in range(20)
        ]

    won = [{at % 2 for at, result in enumerate(some) if result is None} for some in results]
    assert [len(each) for each in won] == [1] * 20
    assert [sum(isinstance(each, ConfigError) for each in some) for some in results] == [4] * 20


async def test_a_corrupt_manifest_is_replaced_and_all_still_agree(store: FileStore) -> None:
    name = Manifest(model="m", weights_version="1", layouts=KV_ONLY).name

    async with opened(store) as first, opened(store) as second:
        for _ in range(10):
            await claim_model(first, "m", "1", KV_ONLY, soon())
            store.spoil(name)
            await asyncio.gather(
                *(claim_model(each, "m", "1", KV_ONLY, soon()) for each in (first, second) * 3)
            )


async def test_a_sound_manifest_that_this_version_cannot_read_is_refused_and_kept() -> None:
    name = Manifest(model="m", weights_version="1", layouts=KV_ONLY).name
    alien = memoryview(bytes([255]) * MANIFEST_BYTES)

    backend = MemoryBackend()
    await backend.open()
    assert await backend.write([writing(name, alien)], deadline=soon()) == [WriteOutcome.OK]
    with pytest.raises(ConfigError, match="another version of Lockstep; use another store"):
        await claim_model(backend, "m", "1", KV_ONLY, soon())
    assert await backend.exists([name], deadline=soon()) == [True]


async def test_a_store_that_does_not_answer_in_time_is_a_storage_error(store: FileStore) -> None:
    async with opened(store) as backend:
        with pytest.raises(StorageError, match="could not be read: TIMED_OUT"):
            await claim_model(backend, "m", "1", KV_ONLY, time.monotonic() - 1.0)


class FullBackend(Wrapper):
    """A store in which every write fails."""

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        return [WriteOutcome.FAILED] * len(writes)


async def claim_by_hand(backend: StorageBackend, store: str) -> None:
    await backend.open()
    await claim_model(backend, "m", "1", KV_ONLY, soon(), store=store)


async def claim_when_opened(backend: StorageBackend, store: str) -> None:
    claimed = ClaimedBackend(backend, model="m", weights_version="1", layouts=KV_ONLY, store=store)
    await claimed.open()


@pytest.mark.parametrize("claim", [claim_by_hand, claim_when_opened])
async def test_a_store_that_refuses_the_manifest_is_named_with_what_to_look_at(
    claim: Callable[[StorageBackend, str], Awaitable[None]],
) -> None:
    pattern = (
        r"^store memory://full: the manifest of model 'm' could not be written: FAILED; the "
        "store refuses it; check the warnings before this error"
    )

    with pytest.raises(StorageError, match=pattern):
        await claim(FullBackend(MemoryBackend()), "memory://full")


@pytest.mark.parametrize("spoilt", [[], ["m"]], ids=["no manifest", "a spoilt one"])
async def test_a_store_that_is_only_read_needs_no_manifest(
    store: FileStore, spoilt: list[str]
) -> None:
    async with opened(store) as backend:
        for model in spoilt:
            await claim_model(backend, model, "1", KV_ONLY, soon())
            store.spoil(Manifest(model=model, weights_version="1", layouts=KV_ONLY).name)

    await claim_when_opened(make_backend(f"{store.root.as_uri()}?read_only=1"), "file:///kv")


async def test_a_store_that_is_only_read_refuses_another_layout(store: FileStore) -> None:
    async with opened(store) as backend:
        await claim_model(backend, "m", "1", {"kv": replace(LAYOUT, page_tokens=32)}, soon())

    with pytest.raises(ConfigError, match="page_tokens is 32 in the store and 16 here"):
        await claim_when_opened(make_backend(f"{store.root.as_uri()}?read_only=1"), "file:///kv")


async def test_a_store_with_the_same_weights_in_pages_of_another_size_is_used_with_a_warning(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def open_with(tokens: int) -> list[str]:
        caplog.clear()
        claimed = ClaimedBackend(
            store.backend(),
            model="m",
            weights_version=f"files 01/{tokens}",
            layouts={"kv": replace(LAYOUT, page_tokens=tokens)},
            weights="files 01",
            store="file:///kv",
        )
        await claimed.open()
        await claimed.close()
        return caplog.messages

    first, [warning], again = [await open_with(tokens) for tokens in (16, 32, 16)]

    assert first == again == []
    assert warning.startswith(
        "store file:///kv: model 'm' with weights version 'files 01', pool 'kv': page"
    )
    assert (
        "page_tokens is 16 in the store and 32 here; use another store, or pages of 16" in warning
    )
    # The warning lists all options for the page size, because each engine has another name for it.
    assert "--page-tokens, --block-size, --page-size" in warning


def test_a_model_with_too_many_columns_for_a_manifest_is_refused() -> None:
    columns = tuple(replace(KEYS, name=f"{number:0200}") for number in range(100))
    with pytest.raises(ConfigError, match="the limit is"):
        run(
            claim_model(
                MemoryBackend(), "m", "1", {"kv": replace(LAYOUT, columns=columns)}, soon_off_loop()
            )
        )


def test_a_namespace_changes_with_everything_that_it_covers() -> None:
    base = Namespace(model="m", weights_version="1", layouts=KV_ONLY)
    others = [
        replace(base, model="n"),
        replace(base, weights_version="2"),
        replace(base, name="tenant"),
        replace(base, model="m1", weights_version=""),
        *(replace(base, layouts={"kv": layout}) for layout, _ in OTHER_LAYOUTS.values()),
        *(replace(base, layouts=layouts) for layouts, _ in OTHER_POOLS.values()),
    ]
    digests = {each.digest() for each in [base, *others]}
    assert len(digests) == 1 + len(others)
    assert replace(base).digest() == base.digest()


def test_a_namespace_does_not_depend_on_the_order_of_its_pools() -> None:
    one = Namespace(model="m", weights_version="1", layouts=HYBRID)
    other = replace(one, layouts=dict(reversed(HYBRID.items())))
    assert one.digest() == other.digest()


def test_a_namespace_is_what_it_was() -> None:
    """A namespace's digest is fixed: another digest would orphan all pages written before."""
    assert Namespace(model="m", weights_version="1", layouts=KV_ONLY, name="t").digest() == (
        "5aa4f5e6c54afb03a78f5ba311e9763cbbbebed839a8e55b1b7425092cd5c1b7"
    )
