"""Under SGLang, requests with images share the prefix before the image, whatever the image's hash."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.integrations.sglang.items import TEXT_ALONE, PromptItems, PromptsWithItems
from lockstep.integrations.sglang.running import token_bytes
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.sglang.host_tier_ranks import RanksBelow
from tests.kit.sglang.sent import Modality, Sent, SentItem, SentItems

PAGE = 8
TEXT = list(range(60))
FIRST, LAST = 21, 40


def image(content: float, name: int | None = None) -> SentItem:
    """Return an image whose hash is derived from `content`, or is `name` if a client gives a hash."""
    hashed = int(content) if name is None else name
    grid: dict[str, object] = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "second_per_grid": None}
    return SentItem(hashed, [(FIRST, LAST)], torch.full((3, 2), content), model_specific_data=grid)


def sent(*items: SentItem, tokens: list[int] = TEXT) -> Sent:
    for item in items:
        tokens = item.pad(tokens)
    return Sent("r", tokens, multimodal_inputs=SentItems([*items]))


def prompt_of(request: Sent, page_tokens: int = PAGE) -> PromptItems:
    found = PromptsWithItems(page_tokens).of(request)
    assert found is not None
    return found


def ids_of(request: Sent, page_tokens: int = PAGE) -> list[int]:
    tokens = request.origin_input_ids
    ids = token_bytes(tokens, len(tokens), prompt_of(request, page_tokens))
    return [*map(int, np.frombuffer(ids, dtype="<i4"))]


def test_what_a_client_calls_an_image_is_not_in_its_ids() -> None:
    assert ids_of(sent(image(1))) == ids_of(sent(image(1, name=77)))


@pytest.mark.parametrize(
    "other",
    [
        replace(image(1), modality=Modality.AUDIO),
        replace(image(1), feature=None, precomputed_embeddings=torch.full((3, 2), 1.0)),
        replace(image(1), model_specific_data={"image_grid_thw": torch.tensor([[1, 1, 4]])}),
        replace(image(1), offsets=[(FIRST, LAST - 1)]),
        replace(image(1), offsets=[(FIRST, 30), (31, LAST)]),
    ],
)
def test_all_that_the_model_reads_of_an_image_is_in_its_ids(other: SentItem) -> None:
    assert ids_of(sent(image(1)))[16:24] != ids_of(sent(other))[16:24]


def test_an_image_in_two_runs_of_placeholders_is_in_both() -> None:
    parts = [(3, 10), (33, 40)]
    cat, dog = (ids_of(sent(replace(image(each), offsets=parts))) for each in (1, 2))

    assert {at // PAGE for at in range(60) if cat[at] != dog[at]} == {0, 4}


def test_the_ids_that_sglang_has_come_back_from_those_in_keys() -> None:
    request = sent(image(1))
    prompt, tokens = prompt_of(request), request.origin_input_ids

    back = [prompt.tokens(token_bytes(tokens, count, prompt)) for count in (8, 24, 60)]

    assert [[*each] for each in back] == [[*tokens[:count]] for count in (8, 24, 60)]
    assert [*TEXT_ALONE.tokens(np.arange(3, dtype=np.int32).tobytes())] == [0, 1, 2]


def test_pages_of_one_token_have_no_room_for_an_image_whose_request_has_a_namespace() -> None:
    assert not prompt_of(sent(image(1)), page_tokens=1).in_ids


BEYOND = sent(image(1))
BEYOND.origin_input_ids[50] = 1_000_000


UNKNOWN = {
    "dropped": sent(replace(image(1), feature=None)),
    "elsewhere": sent(replace(image(1), model_specific_data={"proxy": object()})),
    "no place": sent(SentItem(1, None, torch.ones(2))),
    "beyond the end": sent(SentItem(1, [(50, 70)], torch.ones(2))),
    "not padded": Sent("r", TEXT, multimodal_inputs=SentItems([image(1)])),
    "encoder": Sent(
        "r", image(1).pad(TEXT), multimodal_inputs=SentItems([image(1)], num_image_tokens=4)
    ),
    "unknown ids": BEYOND,
}


@pytest.mark.parametrize("request_", UNKNOWN.values(), ids=UNKNOWN)
def test_a_request_whose_image_is_not_known_is_not_cached(request_: Sent) -> None:
    rank = RanksBelow(1).below[0]

    assert rank.namespaces.items_of(request_) is None
    assert rank.namespaces.of(request_) is None


def test_the_content_is_read_once_and_kept_as_long_as_the_request_has_it() -> None:
    """The digest of an image is kept for a retracted request, because SGLang drops the image itself."""
    prompts, request = PromptsWithItems(PAGE), sent(image(1))
    first = prompts.of(request)
    assert request.multimodal_inputs is not None
    request.multimodal_inputs.mm_items[0].feature = None

    assert prompts.of(request) is first


def hits(below: RanksBelow, *items: SentItem) -> int:
    tokens = sent(*items).origin_input_ids
    below.every(lambda rank: rank.arrive("r", tokens, items=SentItems([*items])))
    found = below.every(lambda rank: rank.hit("r"))
    below.every(lambda rank: rank.forget("r"))
    return found


def test_host_memory_has_the_prompt_before_another_image_and_all_before_and_behind_the_same() -> (
    None
):
    below = RanksBelow(store=False)
    below.publish("a", sent(image(1)).origin_input_ids, SentItems([image(1)]))

    found = hits(below, image(2)), hits(below, image(1, name=9))

    # A page holds four ids, too few for a 128-bit digest, so each image gets a separate namespace.
    assert PAGE_TOKENS == 4
    assert found == (0, len(TEXT))


def test_a_hash_that_has_stood_for_two_images_is_not_cached_and_nothing_is_kept_of_it() -> None:
    below = RanksBelow(store=False)
    tokens = sent(image(1, name=9)).origin_input_ids
    below.every(lambda rank: rank.arrive("a", tokens, items=SentItems([image(1, name=9)])))
    other = sent(image(2, name=9))

    refused = below.every(lambda rank: rank.namespaces.of(other))
    below.every(lambda rank: rank.running.admitted("a", rank.known("a")))
    below.every(
        lambda rank: rank.running.computed(
            Sent("a", tokens), len(tokens), lambda kept: ("lock", rank.rows(kept), None)
        )
    )

    assert refused is None
    assert below.every(lambda rank: len(rank.backups)) == 0
