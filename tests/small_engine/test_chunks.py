"""Prompt chunks: their ends, the pages reserved for them, and the publication of decoded pages."""

import pytest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.small_engine.chunks import Chunks

PAGE = 64


def chunks_of(profile: str, **sizes: int) -> Chunks:
    return Chunks.of(ReplaySettings(profile=profile, **sizes).cache_config())  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", ["llama", "deepseek", "glm", "qwen-next"])
def test_a_model_without_windows_reserves_all_at_once_in_chunks_of_any_size(profile: str) -> None:
    chunks = chunks_of(profile)

    assert not chunks.one_by_one
    assert chunks.end(0, 100_000, 8192, ()) == 8192
    assert chunks.end(99_000, 100_000, 8192, ()) == 100_000


def test_a_chunk_ends_at_the_next_checkpoint() -> None:
    chunks = chunks_of("qwen-next")

    assert chunks.end(0, 5000, 8192, (1024, 2048, 4992)) == 1024
    assert chunks.end(1024, 5000, 8192, (1024, 2048, 4992)) == 2048
    assert chunks.end(1024, 5000, 100, (1024, 2048, 4992)) == 1124
    assert chunks.end(4992, 5000, 8192, (1024, 2048, 4992)) == 5000


@pytest.mark.parametrize(
    ("pages", "chunk_pages"), [(4096, (4096 - 16 - 1) // 2), (40, 11), (19, 1), (18, 1)]
)
def test_two_chunks_and_a_window_fit_the_window_pool_unless_it_has_room_for_one_page(
    pages: int, chunk_pages: int
) -> None:
    chunks = chunks_of("gemma", window_device_pages=pages)

    assert chunks.one_by_one
    assert chunks.end(0, 1 << 30, 1 << 30, ()) == chunk_pages * PAGE


def test_a_request_that_decodes_publishes_pages_as_its_windows_pass() -> None:
    chunks = chunks_of("gpt-oss")

    assert [at for at in range(1, 200) if chunks.publishes(at)] == [64, 128, 192]


def test_a_request_that_decodes_publishes_at_checkpoints_for_its_states() -> None:
    chunks = chunks_of("qwen-next")

    assert [at for at in range(1, 3000) if chunks.publishes(at)] == [1024, 2048]


def test_a_request_that_decodes_publishes_nothing_early_with_full_attention_alone() -> None:
    chunks = chunks_of("llama")

    assert not any(chunks.publishes(at) for at in range(1, 3000))
