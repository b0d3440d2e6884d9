"""What `generate()` puts out for a prompt: tokens and logits, with and without a cache."""

import random
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lockstep.integrations.transformers import LockstepCache

PAGE = 16
NEW_TOKENS = 8
NEAR = 1e-4
"""How far logits may be apart that the same numbers gave in sums of another length."""


class Said(NamedTuple):
    """What came of a prompt."""

    tokens: list[int]
    """The prompt and what followed it."""
    logits: torch.Tensor
    """[new tokens, vocabulary]."""
    reused: int = 0
    """How many tokens of the prompt were not computed."""

    def same_bits(self, other: "Said") -> bool:
        """Say whether tokens and logits are equal to the bit."""
        return self.tokens == other.tokens and torch.equal(self.logits, other.logits)

    def near(self, other: "Said") -> bool:
        """Say whether tokens are equal, and logits but for the order of sums."""
        return self.tokens == other.tokens and torch.allclose(
            self.logits, other.logits, rtol=0, atol=NEAR
        )


def prompt(seed: object, tokens: int = 100, shared: int = 48) -> list[int]:
    """Return a prompt that begins as all others do, and goes on as `seed` says."""
    common, own = random.Random("common"), random.Random(str(seed))
    return [(common if at < shared else own).randrange(3, 500) for at in range(tokens)]


def ids(tokens: list[int]) -> torch.Tensor:
    """Return tokens as `generate()` takes them."""
    return torch.tensor([tokens])


def said(model: PreTrainedModel, tokens: list[int], past: Cache, **options: Any) -> Said:
    """Let a model go on with a prompt, whose first tokens the past may have."""
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
    return Said(output.sequences[0].tolist(), torch.cat(output.logits))


def alone(model: PreTrainedModel, tokens: list[int], **options: Any) -> Said:
    """Let a model go on with a prompt without any cache of ours."""
    return said(model, tokens, DynamicCache(config=model.config), **options)


def with_own_past(model: PreTrainedModel, tokens: list[int], reused: int) -> Said:
    """Do the same where Transformers' own past has the first tokens of a pass over all of them."""
    whole, past = DynamicCache(), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids(tokens).to(model.device), past_key_values=whole)
    for at, layer in enumerate(whole.layers):
        past.update(layer.keys[:, :, :reused], layer.values[:, :, :reused], at)
    return said(model, tokens, past)._replace(reused=reused)


def reusing(
    cache: LockstepCache, model: PreTrainedModel, tokens: list[int], salt: str = "", **options: Any
) -> Said:
    """Let a model go on with a prompt of which a cache may have the first tokens."""
    with cache.reuse(ids(tokens), salt=salt) as past:
        came = said(model, tokens, past, **options)
    return came._replace(reused=past.reused_tokens)
