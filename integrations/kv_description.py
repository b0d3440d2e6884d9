"""Engine-neutral description of a model's KV; the description is part of every page's key (rule R16).

The description has the model's configuration, its compute dtype and the page layout. Together with the
weights, which are another part of the key, the description defines KV as a function of the tokens. All
engines and all TP sizes that compute this function share pages, even if they round results differently.

`POSITIONS` lists the kinds of rotary positions for which vLLM and SGLang gave bit-identical results
(`test_engine_positions.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..page_format.page_layout import PageLayout
from ..ranks.protocol.orders import KV_POOL
from .canonical import canonical, digest

KEYS, VALUES = "k", "v"
"""Names of the columns of a full-attention page; a column has shape (heads, tokens, elements)."""

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
"""The kinds of rotary positions that all engines compute alike, each with its allowed parameters."""

_OF_EVERY_KIND = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

_NOT_THE_MODELS = frozenset(
    {
        # Leave out the model's origin and its stored dtype. Page keys have the engine's compute dtype
        # instead.
        *("_name_or_path", "transformers_version", "dtype", "torch_dtype"),
        # Leave out SGLang's own options, and sizes that follow from the page layout and the weights.
        *("context_len", "encoder_only", "language_model_only", "language_only"),
        *("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"),
    }
)

_UNPROVEN = ("quantization_config", "dual_chunk_attention_config", "attention_chunk_size")
"""Fields of a model configuration that engines may implement with different results."""

_WHOLE = frozenset({"full_attention"})
"""The layer kind that all engines implement alike. Other kinds limit attention, for example to a
window, and an engine may ignore the limit."""


class PretrainedConfig(Protocol):
    """A `transformers.PreTrainedConfig`, to which the engine has already applied all overrides."""

    def to_dict(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class KvDescription:
    """A digest of all inputs to a model's KV except weights and tokens, and the unproven inputs' names.

    An input is unproven if engines may compute different KV from it.
    """

    digest: str
    unproven: tuple[str, ...]
    """Names of the inputs for which engines may compute different KV; empty if all engines compute the
    same KV."""

    @classmethod
    def of(
        cls, model: PretrainedConfig, dtype: object, layouts: Mapping[str, PageLayout]
    ) -> "KvDescription":
        """Describe a model's KV; `dtype` is the compute dtype, `layouts` has page layouts by pool."""
        fields = described(model)
        pages = [
            [pool, layout.page_tokens, [[each.name, each.dtype] for each in layout.columns]]
            for pool, layout in sorted(layouts.items())
        ]
        unproven = [
            *_unproven_pages(layouts),
            *_unproven_positions(fields),
            *_unproven_layers(fields),
            *(name for name in _UNPROVEN if fields.get(name)),
        ]
        found = canonical([fields, dtype, pages], "model description")
        return cls(digest(found), tuple(unproven))


def described(model: PretrainedConfig) -> dict[str, object]:
    """Return the fields of a model's configuration that determine its KV."""
    return {
        name: _rope(cast("Mapping[str, object]", value)) if name == "rope_parameters" else value
        for name, value in model.to_dict().items()
        if name not in _NOT_THE_MODELS
    }


def _rope(parameters: Mapping[str, object]) -> Mapping[str, object]:
    """Return rope parameters without obsolete names.

    A nested mapping has the parameters of one kind of layer; its obsolete names are left out, too.
    """
    inner = {
        name: _rope(cast("Mapping[str, object]", each)) if isinstance(each, Mapping) else each
        for name, each in parameters.items()
    }
    # SGLang adds the obsolete name `type` to a configuration that has `rope_type`.
    return {
        name: each for name, each in inner.items() if name != "type" or "rope_type" not in inner
    }


def _unproven_pages(layouts: Mapping[str, PageLayout]) -> Iterator[str]:
    for pool, layout in sorted(layouts.items()):
        names = [each.name for each in layout.columns]
        if pool != KV_POOL or names != [KEYS, VALUES]:
            yield f"the pool {pool!r} of {', '.join(names)}"


def _unproven_layers(fields: Mapping[str, object]) -> Iterator[str]:
    kinds = set(cast("list[str]", fields.get("layer_types") or ()))
    if beside := kinds - _WHOLE:
        yield f"layers of kind {', '.join(sorted(beside))}"
    elif not kinds and fields.get("sliding_window") and fields.get("use_sliding_window", True):
        yield "sliding_window"


def _unproven_positions(fields: Mapping[str, object]) -> Iterator[str]:
    parameters = cast("Mapping[str, object]", fields.get("rope_parameters") or {})
    inner: list[Any] = [each for each in parameters.values() if isinstance(each, Mapping)]
    for each in cast("list[Mapping[str, object]]", inner or [parameters]):
        kind = str(each.get("rope_type", "default"))
        if kind not in POSITIONS:
            yield f"positions of kind {kind!r}"
        elif beside := each.keys() - POSITIONS[kind] - _OF_EVERY_KIND:
            yield f"positions of kind {kind!r} with {', '.join(sorted(beside))}"
