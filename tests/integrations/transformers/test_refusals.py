"""Models and inputs whose KV depends on more than the tokens are refused by name."""

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lockstep import ConfigError, UsageError
from tests.kit.transformers.generated import NEAR, alone, generate, ids, prompt, reusing

if TYPE_CHECKING:
    from tests.integrations.transformers.conftest import Load, Open

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

PROMPT = prompt("first")
IDS = ids(PROMPT)
PADDED = torch.ones_like(IDS)
PADDED[0, :7] = 0
OTHER = IDS.clone()
OTHER[0, -3] += 1


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (IDS, {"num_beams": 3}, "no beams"),
        (IDS, {"do_sample": True, "num_return_sequences": 2}, "no num_return_sequences"),
        (IDS, {"attention_mask": PADDED}, "no padding"),
        (
            IDS,
            {"position_ids": torch.arange(len(PROMPT))[None] + 5},
            "position_ids must be 0 to 99",
        ),
        (IDS, {"output_attentions": True}, "was given output_attentions"),
        (IDS, {"prompt_lookup_num_tokens": 3}, "to be removed"),
        (OTHER, {}, "computes other tokens from position 0 on"),
        (IDS.repeat(2, 1), {}, "one sequence"),
    ],
)
def test_what_generate_is_asked_for_beside_tokens_is_refused_and_leaves_nothing(
    load: "Load", opened: "Open", given: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    model = load(attn_implementation="eager")
    cache = opened(model)

    with pytest.raises(UsageError, match=message), cache.reuse(IDS) as past:
        model.generate(given, past_key_values=past, max_new_tokens=8, **options)

    after = reusing(cache, model, PROMPT)
    assert (after.reused, after.same_bits(alone(model, PROMPT))) == (0, True)


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}])
def test_what_computes_a_prompt_from_its_start_whatever_the_past_has_is_refused(
    load: "Load", opened: "Open", options: dict[str, Any]
) -> None:
    model = load()
    cache = opened(model)
    reusing(cache, model, PROMPT)

    with (
        pytest.raises(UsageError, match="neither prefill_chunk_size nor an assistant"),
        cache.reuse(IDS) as past,
    ):
        generate(model, PROMPT, past, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 4, 128)}, "was given inputs_embeds"),
        ({"input_ids": IDS, "pixel_values": torch.zeros(1)}, "was given pixel_values"),
        ({"input_ids": IDS[0]}, "got \\[100\\]"),
    ],
)
def test_a_pass_of_the_model_itself_is_held_to_the_same(
    load: "Load", opened: "Open", given: dict[str, Any], message: str
) -> None:
    model = load()

    with pytest.raises(UsageError, match=message), opened(model).reuse(IDS) as past:
        model(**given, past_key_values=past)


def test_arguments_without_their_names_are_refused(load: "Load", opened: "Open") -> None:
    model = load()

    with pytest.raises(UsageError, match="by name"), opened(model).reuse(IDS) as past:
        model(IDS, past_key_values=past)


def test_autocast_is_refused(load: "Load", opened: "Open") -> None:
    model = load()
    cache = opened(model)

    with (
        pytest.raises(UsageError, match="autocast"),
        torch.autocast("cpu", torch.bfloat16),
        cache.reuse(IDS) as past,
    ):
        generate(model, PROMPT, past)


def test_layers_that_are_computed_around_the_model_are_noticed(
    load: "Load", opened: "Open"
) -> None:
    model: Any = load()
    cache = opened(model)

    with (
        pytest.raises(UsageError, match="100 tokens were computed with this past, but only 0"),
        torch.no_grad(),
        cache.reuse(IDS) as past,
    ):
        model.model(input_ids=IDS, past_key_values=past)


def test_the_model_can_be_computed_pass_by_pass(load: "Load", opened: "Open") -> None:
    model = load()
    cache = opened(model)

    with torch.no_grad(), cache.reuse(IDS) as past:
        model(input_ids=IDS[:, :70], past_key_values=past)
        whole = model(input_ids=IDS[:, 70:], past_key_values=past).logits[0, -1]
    with torch.inference_mode(), cache.reuse(IDS) as past:
        rest = model(input_ids=IDS[:, past.reused_tokens :], past_key_values=past).logits[0, -1]

    expected = alone(model, PROMPT).logits[0]
    assert past.reused_tokens == 96
    assert torch.allclose(whole, expected, rtol=0, atol=NEAR)
    assert torch.allclose(rest, expected, rtol=0, atol=NEAR)


def test_one_past_at_a_time_and_none_after_its_block(load: "Load", opened: "Open") -> None:
    model = load()
    cache = opened(model)

    with cache.reuse(IDS) as past:
        with pytest.raises(UsageError, match="in use already"), cache.reuse(IDS):
            pass
        with pytest.raises(UsageError, match="in use"):
            cache.reset()
    with pytest.raises(UsageError, match="used after its block"):
        generate(model, PROMPT, past)


@pytest.mark.parametrize("shape", [(2, 5), (5,), (1, 0)])
def test_a_past_is_for_one_prompt(load: "Load", opened: "Open", shape: tuple[int, ...]) -> None:
    cache = opened(load())

    with (
        pytest.raises(UsageError, match="one sequence at a time"),
        cache.reuse(torch.ones(shape, dtype=torch.long)),
    ):
        pass


def test_a_model_that_is_training_is_refused(load: "Load", opened: "Open") -> None:
    model = load()
    cache = opened(model)
    model.train()

    with pytest.raises(UsageError, match=r"call model\.eval"), cache.reuse(IDS):
        pass


def train(model: Any) -> None:
    """Change the weights in place, as a step of an optimiser does."""
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)


def exchange(model: Any) -> None:
    """Replace the weights by other tensors."""
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)


@pytest.mark.parametrize("change", [train, exchange])
def test_changed_weights_are_noticed_and_after_a_reset_nothing_of_the_former_is_found(
    load: "Load", opened: "Open", store: str, change: Any
) -> None:
    model = load()
    cache = opened(model, store=store)
    reusing(cache, model, PROMPT)
    change(model)

    with pytest.raises(UsageError, match="parameters were changed"), cache.reuse(IDS):
        pass
    cache.reset()
    came = [reusing(cache, model, PROMPT) for _ in range(2)]

    assert [each.reused for each in came] == [0, 96]
    assert [each.near(alone(model, PROMPT)) for each in came] == [True] * 2


def test_weights_that_are_named_at_a_reset_are_found_under_that_name_after_a_restart(
    load: "Load", opened: "Open", store: str
) -> None:
    model = load()
    with opened(model, store=store, weights_version="run 7") as cache:
        reusing(cache, model, PROMPT)
        train(model)
        cache.reset("step 2")
        first = reusing(cache, model, PROMPT)

    cache = opened(model, store=store, weights_version="run 7")
    cache.reset("step 2")
    again = reusing(cache, model, PROMPT)
    cache.reset("step 3")
    other = reusing(cache, model, PROMPT)

    assert (first.reused, again.reused, other.reused) == (0, 96, 0)
    assert again.near(alone(model, PROMPT))


def made(kind: str, **fields: Any) -> Any:
    """Return a model with random weights that was not loaded from files."""
    small = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "pad_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(small | fields))).eval()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer 0 .* LinearAttention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is 'dynamic'",
        ),
    ],
)
def test_a_model_whose_state_no_page_holds_is_refused(
    opened: "Open", kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(made(kind, **fields), weights_version="drawn")


def test_a_model_with_an_encoder_is_refused(opened: "Open") -> None:
    sizes = {
        "d_model": 32,
        "d_ff": 32,
        "d_kv": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 64,
    }
    model = AutoModel.from_config(AutoConfig.for_model("t5", **sizes)).eval()

    with pytest.raises(ConfigError, match="has an encoder"):
        opened(model, weights_version="drawn")


def test_a_model_that_comes_from_no_files_needs_a_name_for_its_weights(opened: "Open") -> None:
    with pytest.raises(ConfigError, match=r"not loaded by from_pretrained.* give weights_version"):
        opened(made("llama"))


def test_a_model_with_adapters_is_refused(load: "Load", opened: "Open") -> None:
    model: Any = load()
    cache = opened(model)
    model.peft_config = {"default": object()}

    with pytest.raises(ConfigError, match="merge_and_unload"), cache.reuse(IDS):
        pass
    with pytest.raises(ConfigError, match="has adapters"):
        opened(model, weights_version="1")
