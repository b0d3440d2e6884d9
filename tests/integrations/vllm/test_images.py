"""Requests with images share the prefix before the image, whatever uuid a client gives the image."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit.vllm.scripted import ScriptedEngine, scripted
from tests.kit.vllm.sent_requests import Content, Item, Position, Scheduled

PAGE = 64
SYSTEM = [7 + each % 90 for each in range(2_000)]
IMAGE_TOKEN, IMAGE_LENGTH = 3, 100
QUESTION = [200 + each for each in range(60)]
WITH_IMAGE = [*SYSTEM, *[IMAGE_TOKEN] * IMAGE_LENGTH, *QUESTION]
BEFORE_IMAGE = len(SYSTEM) // PAGE * PAGE
WHOLE = (len(WITH_IMAGE) - 1) // PAGE * PAGE
BLOCKS: dict[str, Any] = {"page_tokens": PAGE, "host_pages": 200}


def image(content: str, uuid: str = "", at: int = len(SYSTEM), length: int = IMAGE_LENGTH) -> Item:
    pixels = torch.tensor([*content.encode()], dtype=torch.float32)
    data = Content.of(pixel_values=pixels, image_grid_thw=torch.tensor([1, 2, 2]))
    return Item(uuid or f"hash of {content}", Position(at, length), data)


def ask(engine: ScriptedEngine, *images: Item, tokens: list[int] = WITH_IMAGE, **more: Any) -> int:
    before = len(engine.sources)
    engine.serve(tokens, mm_features=[*images], **more)
    return sum(sum(each.values()) for each in engine.sources[before:])


def test_nothing_is_kept_of_a_uuid_that_has_stood_for_another_image(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a uuid has named another image, the request is not cached: vLLM may use the old embeddings."""
    with scripted(**BLOCKS) as engine:
        ask(engine, image("a cat", "logo"))

        again = [ask(engine, image("a dog", "logo")), ask(engine, image("a cat", "logo"))]
        true_dog, cat = ask(engine, image("a dog")), ask(engine, image("a cat"))

    assert again == [0, 0]
    assert (true_dog, cat) == (BEFORE_IMAGE, WHOLE)
    assert [each for each in caplog.messages if "one uuid to two items" in each]


def test_a_request_that_runs_when_its_uuid_is_given_to_another_image_is_not_kept_from_then_on() -> (
    None
):
    with scripted(**BLOCKS) as engine:
        running = engine.arrive(WITH_IMAGE, mm_features=[image("a cat", "logo")])
        ask(engine, image("a dog", "logo"))
        engine.answer_to(running)

        assert ask(engine, image("a cat")) == 0


def test_a_session_brings_a_uuid_whose_content_nobody_knows() -> None:
    with scripted(**BLOCKS) as engine:
        session = engine.arrive(SYSTEM, resumable=True)
        running = engine.arrive(WITH_IMAGE, mm_features=[image("a cat", "logo")])
        session.mm_features.append(image("a dog", "logo"))
        engine.side.end_pass(Scheduled({session.request_id: 1}))
        engine.answer_to(running)
        engine.side.finished(session, ())

        assert ask(engine, image("a cat")) == 0


NO_CONTENT: dict[str, Callable[[], object]] = {
    "raw bytes": lambda: b"pixels",
    "an address": lambda: Content.of(address=1, monotonic_id=2, signature=[3]),
    "left out": lambda: Content.of(pixel_values=None),
    "nothing": UserDict[str, object],
}


@pytest.mark.parametrize("content", NO_CONTENT.values(), ids=NO_CONTENT)
def test_a_request_whose_image_is_not_here_is_neither_stored_nor_looked_up(
    content: Callable[[], object],
) -> None:
    item = Item("logo", Position(len(SYSTEM), IMAGE_LENGTH), content())
    with scripted(**BLOCKS) as engine:
        ask(engine, tokens=[*SYSTEM, *QUESTION])

        hits = [ask(engine, item), ask(engine, item)]

    assert hits == [0, 0]


def test_an_item_that_is_not_among_the_prompt_s_tokens_keeps_a_request_from_the_cache() -> None:
    """A request with an item for an encoder is not cached: all decoder tokens attend to the item."""
    with scripted(**BLOCKS) as engine:
        hits = [ask(engine, image("a cat", at=0, length=9_999)) for _ in range(2)]

    assert hits == [0, 0]


def test_an_engine_that_gets_embeddings_from_others_keeps_no_request_with_an_image() -> None:
    """Images whose embeddings come from another process are not cached: their content is unknown."""
    with scripted(own_embeddings=False, **BLOCKS) as engine:
        hits = [ask(engine, image("a cat")) for _ in range(2)]
        text = [ask(engine, tokens=SYSTEM) for _ in range(2)]

    assert (hits, text) == ([0, 0], [0, (len(SYSTEM) - 1) // PAGE * PAGE])


def test_an_image_too_short_for_its_page_has_a_namespace_of_its_content() -> None:
    at = BEFORE_IMAGE
    with scripted(**BLOCKS) as engine:
        hits = [
            ask(engine, image(content, uuid, at=at, length=4))
            for content, uuid in (("a cat", "1"), ("a dog", "2"), ("a cat", "3"))
        ]

    assert hits == [0, 0, WHOLE]


def test_which_placeholders_embeddings_stand_in_for_counts() -> None:
    items = [image("a cat", uuid) for uuid in ("one", "two")]
    for first, item in enumerate(items):
        item.mm_position.is_embed = torch.arange(IMAGE_LENGTH) > first

    with scripted(**BLOCKS) as engine:
        hits = [ask(engine, image("a cat")), *(ask(engine, each) for each in items)]

    assert hits == [0, BEFORE_IMAGE, BEFORE_IMAGE]


def test_an_image_is_digested_once_for_all_requests_that_have_it() -> None:
    """An image is hashed once for all its requests, because vLLM gives them the same object."""
    item = image("a cat")
    assert isinstance(item.data, Content)
    looked: list[str] = []

    class Watched(Content):
        def __getitem__(self, key: str) -> Any:
            looked.append(key)
            return super().__getitem__(key)

    item.data = Watched(item.data)
    with scripted(**BLOCKS) as engine:
        hits = [ask(engine, item) for _ in range(3)]

    assert hits == [0, WHOLE, WHOLE]
    assert sorted(looked) == ["image_grid_thw", "pixel_values"]
