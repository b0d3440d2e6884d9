"""Adapters count by their weights, and where these are not certain nothing is cached."""

from pathlib import Path

import pytest

from lockstep.integrations.vllm.adapters import Adapters
from lockstep.integrations.weights import FileDigests
from tests.kit.vllm.sent_requests import Adapter


def adapters(adapter: Path) -> Adapters:
    """Return what an engine that has just started knows of adapters."""
    return Adapters(FileDigests(adapter.parent / "digests.json"), {})


def train_again(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"\x02" * 100)


def test_weights_that_are_read_in_another_form_are_others(adapter: Path) -> None:
    known = adapters(adapter)

    flat = known.identify(Adapter("a", str(adapter), 1))
    deep = known.identify(Adapter("b", str(adapter), 2, is_3d_lora_weight=True))

    assert flat != deep


def test_an_adapter_whose_weights_change_under_a_running_engine_is_not_trusted(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may still have the former weights, and has KV of theirs under the same name."""
    known, loaded = adapters(adapter), Adapter("a", str(adapter))
    assert known.identify(loaded) is not None
    assert known.trusted(loaded)

    train_again(adapter)

    assert [known.identify(loaded) for _ in range(2)] == [None, None]
    assert not known.trusted(loaded)
    [told] = caplog.messages
    assert told.startswith("requests with adapter 'a' are not cached: its files were changed while")


@pytest.mark.parametrize("other", [("b", 1), ("a", 2)])
def test_a_name_or_an_id_stands_for_one_adapter_only(adapter: Path, other: tuple[str, int]) -> None:
    known = adapters(adapter)
    known.identify(Adapter("a", str(adapter), 1))
    train_again(adapter)

    name, number = other

    assert known.identify(Adapter(name, str(adapter), number)) is None


def test_weights_under_a_new_name_and_id_are_cached(adapter: Path) -> None:
    known = adapters(adapter)
    before = known.identify(Adapter("a", str(adapter), 1))
    train_again(adapter)

    after = known.identify(Adapter("a, once more", str(adapter), 2))

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
