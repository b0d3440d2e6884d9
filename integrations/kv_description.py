"""What a model's KV follows from, in every engine's words: part of the key of every page (rule R16).

The model's own configuration, the type that it computes in, and what a page has. With the weights,
which the key has beside it, a token's KV is one function of the tokens before it. Engines compute it by
other kernels and round in other places, as groups of other TP sizes do; it is the same function, so
they share.

Positions are where engines differ in what they compute. `POSITIONS` has the kinds that vLLM and SGLang
were found to compute alike, to the last bit; a test compares them again (`test_engine_positions.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..page_format.page_layout import PageLayout
from ..ranks.protocol.orders import KV_POOL
from .canonical import canonical, digest

KEYS, VALUES = "k", "v"
"""The columns of a page of full attention, each in the order heads, tokens, elements."""

POSITIONS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
    ),
}
"""The kinds of rotary positions that engines compute alike, and what each may be given."""

_OF_EVERY_KIND = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

_NOT_THE_MODELS = frozenset(
    {
        # Where it was read, who wrote it, and in which type, which counts as the engine has it.
        *("_name_or_path", "transformers_version", "dtype", "torch_dtype"),
        # What SGLang writes there: its own options, and sizes that the page and the weights have.
        *("context_len", "encoder_only", "language_model_only", "language_only"),
        *("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"),
    }
)

_UNPROVEN = ("quantization_config", "dual_chunk_attention_config", "attention_chunk_size")
"""What a model may say of itself that engines make different numbers of."""

_WHOLE = frozenset({"full_attention"})
"""Layers that look at all tokens before them; an engine may pass over the bounds of other ones."""


class PretrainedConfig(Protocol):
    """`transformers.PreTrainedConfig`, after every override of the engine's."""

    def to_dict(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class KvDescription:
    """What KV follows from beside weights and tokens, and what of it engines may compute otherwise."""

    digest: str
    unproven: tuple[str, ...]
    """In words; empty where every engine comes to the same."""

    @classmethod
    def of(
        cls, model: PretrainedConfig, dtype: object, layouts: Mapping[str, PageLayout]
    ) -> "KvDescription":
        """Describe a model that is computed in `dtype`, torch's; `layouts` are its pages by pool.

        Raises `ConfigError` for what has no canonical bytes.
        """
        said = described(model)
        pages = [
            [pool, layout.page_tokens, [[each.name, each.dtype] for each in layout.columns]]
            for pool, layout in sorted(layouts.items())
        ]
        unproven = [
            *_unproven_pages(layouts),
            *_unproven_positions(said),
            *_unproven_layers(said),
            *(name for name in _UNPROVEN if said.get(name)),
        ]
        found = canonical([said, dtype, pages], "model description")
        return cls(digest(found), tuple(unproven))


def described(model: PretrainedConfig) -> dict[str, object]:
    """Return what a model's own configuration says of KV."""
    return {
        name: _rope(cast("Mapping[str, object]", value)) if name == "rope_parameters" else value
        for name, value in model.to_dict().items()
        if name not in _NOT_THE_MODELS
    }


def _rope(parameters: Mapping[str, object]) -> Mapping[str, object]:
    """Return the parameters under the names of today; there may be some for each kind of layer."""
    inner = {
        name: _rope(cast("Mapping[str, object]", each)) if isinstance(each, Mapping) else each
        for name, each in parameters.items()
    }
    # SGLang writes the older name beside the newer one.
    return {
        name: each for name, each in inner.items() if name != "type" or "rope_type" not in inner
    }


def _unproven_pages(layouts: Mapping[str, PageLayout]) -> Iterator[str]:
    for pool, layout in sorted(layouts.items()):
        names = [each.name for each in layout.columns]
        if pool != KV_POOL or names != [KEYS, VALUES]:
            yield f"the pool {pool!r} of {', '.join(names)}"


def _unproven_layers(said: Mapping[str, object]) -> Iterator[str]:
    kinds = set(cast("list[str]", said.get("layer_types") or ()))
    if beside := kinds - _WHOLE:
        yield f"layers of kind {', '.join(sorted(beside))}"
    elif not kinds and said.get("sliding_window") and said.get("use_sliding_window", True):
        yield "sliding_window"


def _unproven_positions(said: Mapping[str, object]) -> Iterator[str]:
    parameters = cast("Mapping[str, object]", said.get("rope_parameters") or {})
    inner: list[Any] = [each for each in parameters.values() if isinstance(each, Mapping)]
    for each in cast("list[Mapping[str, object]]", inner or [parameters]):
        kind = str(each.get("rope_type", "default"))
        if kind not in POSITIONS:
            yield f"positions of kind {kind!r}"
        elif beside := each.keys() - POSITIONS[kind] - _OF_EVERY_KIND:
            yield f"positions of kind {kind!r} with {', '.join(sorted(beside))}"
