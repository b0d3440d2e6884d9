"""Multimodal items in keys: token ids in the page where an item begins encode the item's content."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.integrations.items import (
    ItemNames,
    Items,
    RequestItem,
    content_digest,
    item_ids,
    named_by_content,
)
from lockstep.integrations.namespaces import namespace_of_parts
from lockstep.ranks.replica.tree.tokens import namespace_seed, page_keys

PAIRS = 10_000
PIXELS = torch.arange(6, dtype=torch.int32)


def cat(start: int, length: int, content: bytes = b"cat") -> RequestItem:
    return RequestItem("cat", start, start + length, content)


def ids_of(tokens: int, items: Items, page_tokens: int) -> list[int]:
    prompt = np.arange(tokens, dtype="<i4").tobytes()
    found = item_ids(prompt, items, page_tokens)
    assert found is not None
    return [*map(int, np.frombuffer(found.of(prompt), dtype="<i4"))]


def keys_of(tokens: bytes, items: Items, page_tokens: int) -> list[bytes]:
    ids = item_ids(tokens, items, page_tokens)
    namespace = namespace_of_parts({"items": named_by_content(() if ids else items)})
    seed = namespace_seed(b"model", namespace)
    return page_keys(seed, tokens if ids is None else ids.of(tokens), page_tokens)


@dataclass(frozen=True)
class Drawn:
    """Two prompts of equal tokens that differ in one multimodal item."""

    tokens: bytes
    page_tokens: int
    one: Items
    other: Items
    differs_at: int
    """Position of the first placeholder of the multimodal item in which the prompts differ."""


def drawn(random: Random) -> Drawn:
    """Draw prompts with up to three multimodal items, at any position, and any page size up to 32."""
    length = random.randint(50, 200)
    starts = sorted(random.sample(range(length - 45), random.randint(1, 3)))
    ends = [
        min(start + random.randint(1, 40), after)
        for start, after in zip(starts, [*starts[1:], length], strict=True)
    ]
    items = tuple(
        RequestItem(at, start, end, random.randbytes(32))
        for at, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
    changed = random.randrange(len(items))
    other = (
        *items[:changed],
        replace(items[changed], content=random.randbytes(32)),
        *items[changed + 1 :],
    )
    placeholder = random.randrange(1000)
    ids = np.array([random.randrange(1000) for _ in range(length)], dtype="<i4")
    for item in items:
        ids[item.start : item.end] = placeholder
    return Drawn(ids.tobytes(), random.choice([1, 4, 5, 8, 16, 32]), items, other, starts[changed])


def wrongs(pair: Drawn) -> str:
    """Return an error if the two prompts share pages wrongly, else an empty string."""
    one = keys_of(pair.tokens, pair.one, pair.page_tokens)
    other = keys_of(pair.tokens, pair.other, pair.page_tokens)
    common = sum(a == b for a, b in zip(one, other, strict=True))
    if {*one[pair.differs_at // pair.page_tokens :]} & {*other}:
        return f"pages with another item are shared: {pair}"
    if item_ids(pair.tokens, pair.one, pair.page_tokens) is None:
        return "" if common == 0 else f"a namespace of its own is shared: {pair}"
    return "" if common == pair.differs_at // pair.page_tokens else f"a prefix is lost: {pair}"


def test_equal_tokens_with_other_items_never_share_a_page_from_the_item_on_and_all_before_it() -> (
    None
):
    random = Random(36)
    pairs = [drawn(random) for _ in range(PAIRS)]

    assert [wrong for pair in pairs if (wrong := wrongs(pair))] == []
    assert (
        sum(item_ids(each.tokens, each.one, each.page_tokens) is not None for each in pairs)
        > PAIRS / 3
    )


def test_an_item_is_in_the_page_in_which_it_begins_up_to_its_last_placeholder_there() -> None:
    ids = ids_of(32, (cat(13, 2),), 8)

    assert [at for at, found in enumerate(ids) if found != at] == [8, 9, 10, 11, 12, 13, 14]


def test_an_item_that_begins_with_the_last_token_of_a_page_fills_that_page() -> None:
    """If an item starts at a page's last token, the ids of the whole page encode the item's digest."""
    ids = ids_of(32, (cat(15, 10),), 8)

    assert all(found < 0 for found in ids[8:16])
    assert ids[16:] == [*range(16, 32)]


@pytest.mark.parametrize(("start", "length", "page_tokens"), [(8, 4, 8), (0, 1, 8), (8, 40, 4)])
def test_a_page_without_room_for_128_bits_has_no_item_in_its_ids(
    start: int, length: int, page_tokens: int
) -> None:
    prompt = np.arange(64, dtype="<i4").tobytes()

    assert item_ids(prompt, (cat(start, length),), page_tokens) is None


@pytest.mark.parametrize(
    "items",
    [
        (cat(9, 20, b"dog"),),
        (cat(9, 19),),
        (cat(10, 20),),
        (cat(9, 20), cat(11, 4)),
        (cat(9, 20), cat(9, 20)),
    ],
)
def test_content_place_and_number_of_items_tell_equal_tokens_apart(items: Items) -> None:
    assert ids_of(32, items, 16)[:16] != ids_of(32, (cat(9, 20),), 16)[:16]


OTHERS: Mapping[str, tuple[Any, ...]] = {
    "another value": ({"pixels": PIXELS + 1},),
    "another type": ({"pixels": PIXELS.to(torch.int64)},),
    "the same bytes as another type": ({"pixels": PIXELS.view(torch.float32)},),
    "another shape": ({"pixels": PIXELS.reshape(2, 3)},),
    "another name": ({"pixel": PIXELS},),
    "one thing more": ({"pixels": PIXELS, "grid": [1, 2]},),
    "another grid": ({"pixels": PIXELS, "grid": [2, 1]},),
    "a list": ({"pixels": [PIXELS]},),
    "a list of two": ({"pixels": [PIXELS[:3], PIXELS[3:]]},),
    "two lists": ({"pixels": [[PIXELS[:3]], [PIXELS[3:]]]},),
    "an array": ({"pixels": PIXELS.numpy()},),
    "a number": ({"pixels": PIXELS, "grid": 1},),
    "the same number as text": ({"pixels": PIXELS, "grid": "1"},),
    "the same number as a flag": ({"pixels": PIXELS, "grid": True},),
}


def test_everything_that_a_model_reads_of_an_item_counts() -> None:
    digests = [
        content_digest({"pixels": PIXELS}),
        *(content_digest(*each) for each in OTHERS.values()),
    ]

    assert None not in digests
    assert len({*digests}) == len(digests)


def test_where_a_content_lies_in_memory_does_not_count() -> None:
    strided = torch.stack([PIXELS, PIXELS + 1], dim=1)[:, 0]

    assert content_digest(strided) == content_digest(PIXELS.clone())


@pytest.mark.parametrize(
    "content",
    [
        {"address": 7, "monotonic_id": 1, "signature": [1, 2]},
        {"pixels": None},
        {"pixels": PIXELS, "grid": None},
        {"pixels": PIXELS, "proxy": object()},
        {"pixels": np.array([object()])},
        {"pixels": PIXELS.to("meta")},
        {1: PIXELS, "pixels": PIXELS},
    ],
)
def test_what_is_not_all_content_has_no_digest(content: object) -> None:
    assert content_digest(content) is None


def test_a_name_that_has_stood_for_two_contents_is_not_trusted_again() -> None:
    warnings: list[str] = []
    names = ItemNames(lambda: warnings.append("told"))
    logo, other = cat(0, 8), cat(0, 8, b"dog")
    names.note([logo])
    before = names.trusted([logo]), names.trusted([other])

    names.note([other])
    names.note([logo])

    assert before == (True, False)
    assert (names.trusted([logo]), names.trusted([other]), warnings) == (False, False, ["told"])


def test_a_name_of_an_unknown_content_is_not_trusted() -> None:
    names = ItemNames(lambda: None)
    names.note_unknown(["cat"])

    names.note([cat(0, 8)])

    assert not names.trusted([cat(0, 8)])
