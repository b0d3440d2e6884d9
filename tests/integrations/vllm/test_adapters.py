"""Adapters are identified by their weights; if these are uncertain, their KV is not cached."""

from pathlib import Path

import pytest

from lockstep.integrations.adapters import AdapterWeights
from lockstep.integrations.vllm.adapters import adapter_weights, loaded
from lockstep.integrations.weights import FileDigests
from tests.kit.vllm.sent_requests import Adapter


@pytest.fixture
def known(digests: FileDigests) -> AdapterWeights:
    return adapter_weights(digests, {})


def train_again(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"\x02" * 100)


def test_weights_that_are_read_in_another_form_are_others(
    adapter: Path, known: AdapterWeights
) -> None:
    flat = known.identify(loaded(Adapter("a", str(adapter), 1)))
    deep = known.identify(loaded(Adapter("b", str(adapter), 2, is_3d_lora_weight=True)))

    assert flat != deep


def test_an_adapter_whose_weights_change_under_a_running_engine_is_not_trusted(
    adapter: Path, known: AdapterWeights, caplog: pytest.LogCaptureFixture
) -> None:
    """If an adapter's files change under a running engine, the adapter is not cached any more."""
    one = loaded(Adapter("a", str(adapter)))
    assert known.identify(one) is not None
    assert known.trusted(one)

    train_again(adapter)

    assert [known.identify(one) for _ in range(2)] == [None, None]
    assert not known.trusted(one)
    [message] = caplog.messages
    assert message.startswith(
        "requests with adapter 'a' are not cached: its files were changed while"
    )


@pytest.mark.parametrize("other", [("b", 1), ("a", 2)])
def test_a_name_or_an_id_stands_for_one_adapter_only(
    adapter: Path, known: AdapterWeights, other: tuple[str, int]
) -> None:
    known.identify(loaded(Adapter("a", str(adapter), 1)))
    train_again(adapter)

    name, number = other

    assert known.identify(loaded(Adapter(name, str(adapter), number))) is None
