"""Fields that distinguish the KV of one model from that of another (R16)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from lockstep.integrations.sharing import names_of
from lockstep.integrations.transformers.key_exclusions import OPERATIONAL, READ_IN
from lockstep.integrations.transformers.kv_identity import configuration_digest, weights_of
from lockstep.integrations.weights import FileDigests

if TYPE_CHECKING:
    from tests.integrations.transformers.conftest import Load

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

KEYED = {
    "chunk_size_feed_forward",
    "dtype",
    "is_encoder_decoder",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_output_attentions",
}
"""Fields that every configuration has and that are in the key."""

KEYED_IN_LLAMA = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("pretraining_tp", "rope_parameters", "attention_bias", "mlp_bias", "head_dim"),
}


def test_the_reasons_were_read_in_the_version_that_is_installed() -> None:
    assert transformers.__version__.startswith(f"{READ_IN}.")


@pytest.mark.parametrize(
    ("config", "keyed"),
    [
        (PreTrainedConfig(), KEYED),
        (AutoConfig.for_model("llama"), KEYED | KEYED_IN_LLAMA),
    ],
)
def test_every_field_is_known_to_be_in_the_key_or_proven_out(
    config: PreTrainedConfig, keyed: set[str]
) -> None:
    """Configuration fields are in the key unless excluded; exclude one only if it cannot change KV."""
    assert set(vars(config)) - names_of(OPERATIONAL) == keyed


def digest(model: Any) -> str:
    return configuration_digest(model, "5.19.0")


def rope(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5e5


def heads(model: Any) -> None:
    model.config.num_key_value_heads = 1


def unknown(model: Any) -> None:
    model.config.something_new = 1


def halved(model: Any) -> None:
    model.model.layers[0].to(torch.float16)


def attention(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [rope, heads, unknown, halved, attention])
def test_what_may_change_kv_counts(load: "Load", change: Callable[[Any], None]) -> None:
    model = load()
    before = digest(model)

    change(model)

    assert digest(model) != before


def test_debug_logs_of_ranks_that_differ_say_in_which_field(
    load: "Load", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "lockstep.transformers")
    model = load()
    digest(model)
    one = {*caplog.messages}

    rope(model)
    digest(model)

    changed = {line.split()[0] for line in {*caplog.messages} - one}
    assert changed == {"model.config.rope_parameters"}


def moved(model: Any) -> None:
    model.config._name_or_path = "/elsewhere"


def ends(model: Any) -> None:
    model.config.eos_token_id = 7


@pytest.mark.parametrize("change", [moved, ends])
def test_what_is_proven_out_does_not(load: "Load", change: Callable[[Any], None]) -> None:
    model = load()
    before = digest(model)

    change(model)

    assert digest(model) == before


def test_the_version_of_the_code_and_of_the_products_count(load: "Load") -> None:
    model = load()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    lower = digest(model)
    torch.set_float32_matmul_precision(before)

    assert len({digest(model), lower, configuration_digest(model, "5.20.0")}) == 3


def test_weights_count_by_their_files_by_their_commit_or_by_the_user_s_word(
    load: "Load", tmp_path: Path
) -> None:
    model: Any = load()
    read = FileDigests(tmp_path / "weights.json")

    by_files = weights_of(model, None, read)
    model.model.norm.weight.detach()[3] = 2.0
    by_other_files = weights_of(model, None, read)
    by_word = weights_of(model, "7", read)
    model.config._name_or_path, model.config._commit_hash = "somebody/model", "0123456789" * 4
    by_commit = weights_of(model, None, read)

    assert by_files.startswith("files ")
    assert by_files != by_other_files
    assert by_word == "version 7"
    assert by_commit.startswith(f"commit {'0123456789' * 4}, norms ")
