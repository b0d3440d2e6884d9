"""What a chunk's name covers where vLLM's own code has made the tier, and what is refused."""

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_llama

from lockstep.errors import ConfigError
from lockstep.integrations.vllm.tier.names import ChunkNames

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`tests.kit.vllm.tier.offloading_connector`. What vLLM warns of while it is set up is not ours."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("tests.kit.vllm.tier.offloading_connector")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    tiny_llama.make(folder)
    return folder


@pytest.fixture
def named(kit: ModuleType, folder: Path, tmp_path: Path) -> Any:
    """How an engine with these settings names its chunks."""

    def named(**settings: Any) -> ChunkNames:
        names: ChunkNames = kit.named(kit.Wanted(folder, tmp_path / "digests", **settings))
        return names

    return named


def test_vllms_own_connector_tells_a_tier_too_little_and_that_is_said(named: Any) -> None:
    with pytest.raises(ConfigError, match=r"Use LockstepOffloadingConnector .* or give weights_v"):
        named(connector="OffloadingConnector")


def test_a_version_stands_for_all_that_vllms_own_connector_does_not_tell(named: Any) -> None:
    plain = {"connector": "OffloadingConnector"}
    one, again, two = (named(**plain, tier={"weights_version": each}) for each in ("1", "1", "2"))

    assert one == again
    assert one.namespace != two.namespace


def test_equal_engines_have_equal_names(named: Any) -> None:
    assert named() == named(arguments={"seed": 7, "max_num_seqs": 3})


def test_other_weights_have_other_names(named: Any, folder: Path) -> None:
    before = named()
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)

    assert named().namespace != before.namespace


@pytest.mark.parametrize(
    "arguments",
    [
        {"hf_overrides": {"rope_theta": 1234.0}},
        {"max_model_len": 256},
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rms_norm_eps": 0.25}},
    ],
)
def test_other_options_that_may_change_kv_have_other_names(
    named: Any, arguments: dict[str, Any]
) -> None:
    assert named(arguments=arguments).namespace != named().namespace


def test_a_version_stands_for_the_weights_and_not_for_the_options(named: Any, folder: Path) -> None:
    version = {"tier": {"weights_version": "1"}}
    one = named(**version)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"?")

    assert named(**version) == one
    assert named(**version, arguments={"max_model_len": 256}).namespace != one.namespace


def test_chunks_of_another_size_have_other_names(named: Any) -> None:
    assert named(extra={"blocks_per_chunk": 2}).namespace != named().namespace


def test_the_tp_size_is_in_the_shard_and_not_in_the_namespace(named: Any) -> None:
    two = named(arguments={"tensor_parallel_size": 2})

    assert (two.shard, named().shard) == ("direct.tp2.pp1.pcp1.dcp1.of2", "one-copy")
    assert two.namespace == named().namespace


def test_canonical_chunks_are_the_same_for_both_tp_sizes(named: Any) -> None:
    canonical = {"extra": {"canonical_layout": True}}

    assert named(**canonical, arguments={"tensor_parallel_size": 2}) == named(**canonical)
