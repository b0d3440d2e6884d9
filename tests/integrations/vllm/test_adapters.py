"""Adapters count by their weights, and where these are not certain nothing is cached."""

from pathlib import Path

import pytest

from lockstep.integrations.vllm.adapters import Adapters
from lockstep.integrations.weights import FileDigests
from tests.kit.vllm.sent_requests import Adapter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with an adapter."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"\x01" * 100)
    return folder


def adapters(path: Path, **versions: str) -> Adapters:
    """Return what an engine that has just started knows of adapters."""
    return Adapters(FileDigests(path.parent / "digests.json"), versions)


def train_again(path: Path) -> None:
    (path / "adapter_model.safetensors").write_bytes(b"\x02" * 100)


def test_weights_that_are_read_in_another_form_are_others(path: Path) -> None:
    flat, deep = Adapter("a", str(path), 1), Adapter("b", str(path), 2, is_3d_lora_weight=True)
    known = adapters(path)

    assert known.identify(flat) != known.identify(deep)


def test_an_adapter_whose_weights_change_under_a_running_engine_is_not_trusted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may still have the former weights, and has KV of theirs under the same name."""
    known, adapter = adapters(path), Adapter("a", str(path))
    assert known.identify(adapter) is not None
    assert known.trusted(adapter)

    train_again(path)

    assert [known.identify(adapter) for _ in range(2)] == [None, None]
    assert not known.trusted(adapter)
    [told] = caplog.messages
    assert told.startswith("requests with adapter 'a' are not cached: its files were changed while")


@pytest.mark.parametrize("other", [("b", 1), ("a", 2)])
def test_a_name_or_an_id_stands_for_one_adapter_only(path: Path, other: tuple[str, int]) -> None:
    known = adapters(path)
    known.identify(Adapter("a", str(path), 1))
    train_again(path)

    name, number = other

    assert known.identify(Adapter(name, str(path), number)) is None


def test_weights_under_a_new_name_and_id_are_cached(path: Path) -> None:
    known = adapters(path)
    before = known.identify(Adapter("a", str(path), 1))
    train_again(path)

    after = known.identify(Adapter("a, once more", str(path), 2))

    assert None not in {before, after}
    assert before != after


def test_an_adapter_that_cannot_be_read_is_named_once_and_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known, adapter = adapters(tmp_path), Adapter("a", str(tmp_path / "nowhere"))

    assert [known.identify(adapter) for _ in range(3)] == [None] * 3

    [told] = caplog.messages
    assert told.startswith("requests with adapter 'a' are not cached: its weights cannot be read")
    assert "adapter_versions of kv_connector_extra_config" in told
