"""Checks the inputs of a model that computes with a `ReusedPast`; refuses inputs outside page keys.

A page's key covers only tokens. An image, an attention mask or unusual positions would change KV
without changing the key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError
from .past import ReusedPast

NEUTRAL = frozenset(
    {"past_key_values", "input_ids", "use_cache", "return_dict", "logits_to_keep"}
    # Allow a mask and positions, because each forward pass is checked: the mask must have no padding,
    # and the positions must have no gaps.
    | {"attention_mask", "position_ids", "cache_position"}
)
"""Arguments of a forward pass that are allowed because they do not change KV. Any other argument must
be absent, None or False."""


class ForwardPasses:
    """A hook that runs before each forward pass; it checks the inputs and records the tokens."""

    def __init__(self, past: ReusedPast, prompt: Sequence[int]) -> None:
        self._past = past
        self._prompt = prompt
        self.tokens = list(prompt[: past.reused_tokens])
        """Ids of the tokens whose keys and values are in the `ReusedPast`."""

    def __call__(
        self, _: torch.nn.Module, given: tuple[object, ...], named: Mapping[str, Any]
    ) -> None:
        """Record a forward pass's tokens; raise `UsageError` if its KV depends on other inputs."""
        if any(each is self._past for each in given):
            raise UsageError("give the model its arguments by name, including past_key_values")
        if named.get("past_key_values") is not self._past:
            return
        if given:
            raise UsageError("give the model its arguments by name, as `generate()` does")
        for name, value in named.items():
            if name not in NEUTRAL and value is not None and value is not False:
                raise UsageError(
                    f"the model was given {name}, which may change its KV and is in no page's"
                    " key; run this request without the cache"
                )
        tokens = named.get("input_ids")
        if tokens is None or tokens.ndim != 2 or len(tokens) != 1:
            found = "none" if tokens is None else list(tokens.shape)
            raise UsageError(
                f"a past needs the token ids of one sequence, [1, tokens], but got {found}: no"
                " beams, no num_return_sequences, no batch and no inputs_embeds"
            )
        if torch.is_autocast_enabled(tokens.device.type):
            raise UsageError("the model runs under autocast, which is in no page's key; disable it")
        start, new = self._past.get_seq_length(), tokens[0].tolist()
        expected = list(self._prompt[start : start + len(new)])
        if new[: len(expected)] != expected:
            raise UsageError(
                f"the model computes other tokens from position {start} on than `reuse` was given;"
                " give both the same prompt, and neither prefill_chunk_size nor an assistant, because"
                " Transformers then ignores the past"
            )
        self._require_plain(named, start, start + len(new))
        self.tokens += new

    @staticmethod
    def _require_plain(named: Mapping[str, Any], start: int, end: int) -> None:
        mask = named.get("attention_mask")
        if mask is not None and (mask.ndim != 2 or mask.shape[-1] != end or not bool(mask.all())):
            raise UsageError(
                "the attention mask leaves tokens out, or is not of shape [1, tokens]; use no padding"
                " with the cache"
            )
        for name in ("position_ids", "cache_position"):
            positions = named.get(name)
            if positions is None:
                continue
            plain = torch.arange(start, end, device=positions.device)
            if positions.shape[-1] != end - start or not bool((positions == plain).all()):
                raise UsageError(
                    f"{name} must be {start} to {end - 1}, the positions of the tokens"
                )
