"""Images in vLLM are identified by content, and requests share the system prompt before an image."""

import json
from pathlib import Path

import pytest

from tests.kit.vllm.processes import Program, run_together
from tests.kit.vllm.tiny_models import make_llava

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SYSTEM, WHOLE = 1_984, 2_080
"""Tokens in whole blocks: of the system prompt, and of a prompt with one image."""

UNDER_A_USED_UUID = 6
"""Index of the request that reuses another image's uuid; the next request has no uuid."""


def test_the_system_prompt_hits_before_another_image_and_a_uuid_changes_nothing(
    tmp_path: Path,
) -> None:
    make_llava(tmp_path / "model")

    def answers_with(store: str) -> list[tuple[int, list[int]]]:
        answers = tmp_path / "answers"
        program = Program("tests.kit.vllm.image_requests", (tmp_path / "model", store, answers))
        run_together([program], tmp_path, within_s=280).check()
        found: list[tuple[int, list[int]]] = json.loads(answers.read_text())
        return found

    alone, cached = answers_with(""), answers_with(f"file://{tmp_path}/store")

    expected = [tokens for _, tokens in alone]
    # Without Lockstep, vLLM wrongly answers this request with the image that first had the uuid.
    assert expected[UNDER_A_USED_UUID] == expected[0]
    expected[UNDER_A_USED_UUID] = expected[UNDER_A_USED_UUID + 1]
    assert [tokens for _, tokens in cached] == expected
    assert [hit for hit, _ in cached] == [0, SYSTEM, WHOLE, WHOLE, WHOLE, WHOLE, 0, SYSTEM]
