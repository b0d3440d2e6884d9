"""SGLang's adapters are identified by the weights that SGLang has loaded, not by their ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.integrations.sglang.identity.adapters import FROM_TENSORS, Adapters, without_adapter
from lockstep.integrations.weights import FileDigests


@dataclass(frozen=True)
class Loaded:
    lora_name: str | None
    lora_path: str | None


def adapters(loaded: Mapping[str, Loaded], adapter: Path) -> Adapters:
    return Adapters(loaded, FileDigests(adapter.parent / "digests.json"), {}, where="the config")


def train_again(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"\x02" * 100)


def test_an_adapter_that_was_trained_again_in_place_is_another_one_once_it_is_loaded_again(
    adapter: Path,
) -> None:
    loaded = {"id 1": Loaded("a", str(adapter))}
    known = adapters(loaded, adapter)
    before = known.identify("id 1")

    train_again(adapter)
    del loaded["id 1"]
    loaded["id 2"] = Loaded("a", str(adapter))
    after = known.identify("id 2")

    assert None not in {before, after}
    assert before != after
    assert known.identify("id 1") is None


def test_an_adapter_is_what_it_was_when_it_was_loaded_whatever_becomes_of_its_files(
    adapter: Path,
) -> None:
    known = adapters({"id 1": Loaded("a", str(adapter))}, adapter)
    known.look()
    before = known.identify("id 1")

    train_again(adapter)

    assert before is not None
    assert known.identify("id 1") == before


@pytest.mark.parametrize(
    ("loaded", "doubt"),
    [
        (Loaded("a", "/nowhere"), "its weights cannot be read"),
        (Loaded("a", FROM_TENSORS), "its weights did not come from files"),
    ],
)
def test_an_adapter_whose_weights_are_not_known_is_named_once_and_not_cached(
    loaded: Loaded, doubt: str, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = adapters({"id 1": loaded}, adapter)

    assert [known.identify("id 1") for _ in range(3)] == [None] * 3

    [message] = caplog.messages
    assert message.startswith(f"requests with adapter 'a' are not cached: {doubt}")
    assert "adapter_versions of the config" in message


@pytest.mark.parametrize(
    ("extra_key", "lora_id", "left"),
    [
        (None, None, ""),
        ("user", None, "user"),
        ("userid 1", "id 1", "user"),
        ("id 1", "id 1", ""),
        ("userid 1|size=2", "id 1", "user|size=2"),
    ],
)
def test_the_id_of_an_adapter_is_taken_out_of_a_request_s_extra_key(
    extra_key: str | None, lora_id: str | None, left: str
) -> None:
    assert without_adapter(extra_key, lora_id) == left
