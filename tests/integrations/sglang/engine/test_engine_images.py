"""Images in SGLang's tree: two requests with different images share the prefix before the image."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.rig import BATCH, Rig
from tests.kit.sglang.tree.rigs import one_rig

pytestmark = here.MARKS

PAGES = 20
IMAGE_LENGTH = 50


@pytest.fixture
def rig() -> Generator[Rig]:
    with one_rig(kind="attention, long pages") as rig:
        yield rig


def with_image(rig: Rig, content: float) -> tuple[list[int], Any]:
    """Return a prompt with an image, in the form that SGLang's scheduler receives.

    The image starts 5 tokens after the first `PAGES` pages.
    """
    start = PAGES * rig.page_tokens + 5
    prompt = [*range(start), *[3] * IMAGE_LENGTH, *range(500, 530)]
    modality = here.of(BATCH, "Modality")
    item = here.of(BATCH, "MultimodalDataItem")(
        modality=modality.IMAGE,
        hash=None,
        offsets=[(start, start + IMAGE_LENGTH - 1)],
        feature=torch.full((4, 8), content),
        model_specific_data={"image_grid_thw": torch.tensor([[1, 2, 2]])},
    )
    item.set_pad_value()
    output = here.of(BATCH, "MultimodalProcessorOutput")
    padded = output.build_padded_input_ids(prompt, [item])
    return padded, here.of(BATCH, "MultimodalInputs")(mm_items=[item])


def again(rig: Rig, content: float) -> tuple[int, list[str]]:
    """Empty the device cache and serve a prompt; return its cached tokens and its wrong pages."""
    rig.evict_all()
    tokens, items = with_image(rig, content)
    cached = rig.serve(tokens, items=items)
    return cached, rig.wrong(tokens[: len(tokens) // rig.page_tokens * rig.page_tokens])


def test_what_is_before_another_image_comes_back_from_the_host_and_all_of_the_same(
    rig: Rig,
) -> None:
    tokens, items = with_image(rig, 1.0)
    rig.serve(tokens, items=items)
    whole = (len(tokens) - 1) // rig.page_tokens * rig.page_tokens

    found = [again(rig, content) for content in (2.0, 1.0, 2.0)]

    assert found == [(PAGES * rig.page_tokens, []), (whole, []), (whole, [])]
