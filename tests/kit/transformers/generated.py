"""Returns tokens and logits of Transformers' `generate()` for a prompt, with and without a cache."""

import random
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lockstep.integrations.transformers import LockstepCache

PAGE = 16
NEW_TOKENS = 8
NEAR = 1e-4
"""Largest rounding difference between logits whose terms were added in different orders."""


class Generated(NamedTuple):
    """The output of one `generate()` call."""

    tokens: list[int]
    """The prompt followed by the generated tokens."""
    logits: torch.Tensor
    """Logits of shape [new tokens, vocabulary]."""
    reused: int = 0
    """How many of the prompt's tokens came from the cache."""

    def same_bits(self, other: "Generated") -> bool:
        return self.tokens == other.tokens and torch.equal(self.logits, other.logits)

    def near(self, other: "Generated") -> bool:
        """Return whether both outputs have the same tokens, and logits at most `NEAR` apart."""
        return self.tokens == other.tokens and torch.allclose(
            self.logits, other.logits, rtol=0, atol=NEAR
        )


def prompt(seed: object, tokens: int = 100, shared: int = 48) -> list[int]:
    """Return a random prompt; its first `shared` tokens are the same for every `seed`."""
    common, own = random.Random("common"), random.Random(str(seed))
    return [(common if at < shared else own).randrange(3, 500) for at in range(tokens)]


def ids(tokens: list[int]) -> torch.Tensor:
    """Return tokens as the [1, tokens] tensor that `generate()` takes."""
    return torch.tensor([tokens])


def generate(model: PreTrainedModel, tokens: list[int], past: Cache, **options: Any) -> Generated:
    """Generate from a prompt; the cache `past` has KV of the prompt's first tokens, or is empty."""
    output = model.generate(
        ids(tokens).to(model.device),
        past_key_values=past,
        **{
            "max_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "eos_token_id": None,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        | options,
    )
    return Generated(output.sequences[0].tolist(), torch.cat(output.logits))


def alone(model: PreTrainedModel, tokens: list[int], **options: Any) -> Generated:
    """Generate from a prompt without a Lockstep cache."""
    return generate(model, tokens, DynamicCache(config=model.config), **options)


def with_own_past(model: PreTrainedModel, tokens: list[int], reused: int) -> Generated:
    """Generate from a prompt whose first `reused` tokens are in Transformers' own cache.

    The KV in this cache comes from a forward pass over the whole prompt.
    """
    whole, past = DynamicCache(), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids(tokens).to(model.device), past_key_values=whole)
    for at, layer in enumerate(whole.layers):
        past.update(layer.keys[:, :, :reused], layer.values[:, :, :reused], at)
    return generate(model, tokens, past)._replace(reused=reused)


def reusing(
    cache: LockstepCache, model: PreTrainedModel, tokens: list[int], salt: str = "", **options: Any
) -> Generated:
    """Generate from a prompt, reusing the first tokens that the Lockstep cache holds."""
    with cache.reuse(ids(tokens), salt=salt) as past:
        came = generate(model, tokens, past, **options)
    return came._replace(reused=past.reused_tokens)
