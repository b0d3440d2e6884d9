"""How many layers of a model have full attention, window attention or recurrent states."""

from collections import Counter
from dataclasses import dataclass

from ...errors import ConfigError
from .config_fields import ConfigFields

LAYERS_MAX, WINDOW_MAX = 10_000, 1 << 22
FULL, WINDOW, STATE = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """How many layers of a model have each kind of attention."""

    full: int
    window: int = 0
    state: int = 0
    window_tokens: int = 0


def layer_kinds(fields: ConfigFields) -> LayerKinds:
    """Return the kinds of a model's layers; raise `ConfigError` that names an unknown kind."""
    kinds = Counter(_kinds(fields, fields.number("num_hidden_layers", most=LAYERS_MAX)))
    unknown = kinds.keys() - {FULL, WINDOW, STATE}
    if unknown:
        raise ConfigError(
            f"{fields.where}: layers of the kind {min(unknown)!r} are not supported, only"
            f" {FULL}, {WINDOW} and {STATE}; use the profile nearest to the model"
        )
    if not kinds[FULL]:
        raise ConfigError(
            f"{fields.where}: no layer has full attention, which Lockstep's pages require; use the"
            " profile nearest to the model"
        )
    window_tokens = fields.number("sliding_window", most=WINDOW_MAX) if kinds[WINDOW] else 0
    return LayerKinds(kinds[FULL], kinds[WINDOW], kinds[STATE], window_tokens)


def _kinds(fields: ConfigFields, layers: int) -> list[str]:
    listed = fields.words("layer_types")
    if listed:
        if len(listed) != layers:
            raise ConfigError(
                f"{fields.where}: layer_types has {len(listed)} layers, num_hidden_layers is {layers}"
            )
        return listed
    if fields.has("full_attention_interval"):
        every = fields.number("full_attention_interval")
        return [STATE if (at + 1) % every else FULL for at in range(layers)]
    if not fields.has("sliding_window"):
        return [FULL] * layers
    if fields.has("sliding_window_pattern"):
        every = fields.number("sliding_window_pattern")
        return [WINDOW if (at + 1) % every else FULL for at in range(layers)]
    if fields.has("use_sliding_window"):
        first = fields.number("max_window_layers", layers, least=0)
        windowed = fields.flag("use_sliding_window")
        return [WINDOW if windowed and at >= first else FULL for at in range(layers)]
    return [WINDOW] * layers
