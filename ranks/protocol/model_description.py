"""Description of all state that a model keeps for a prefix, to check that the cache stores all of it.

If a cache restored a prefix's KV without its recurrent state, or without the sparse-attention index,
the engine would compute from an incomplete prefix. Therefore a configuration whose pools do not store
all described state raises `ConfigError` when it is created.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...coordinator.validated_settings import Settings
from ...errors import ConfigError

FULL_ATTENTION = "full_attention"
"""Name of the kind of state that every model has: the KV of full attention."""


@dataclass(frozen=True, kw_only=True)
class KeptState(Settings):
    """One kind of state that layers of a model keep: for each token, or at some prefix lengths."""

    kind: str
    """The kind of the state: `full_attention`, `sliding_window` or `recurrent`."""
    layers: int
    """Number of layers that keep this state; used in error messages only."""
    columns: tuple[str, ...]
    """Names of the tensors of this state: `k` and `v`, `latent`, `index_k`, `conv`, ..."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription(Settings):
    """All the state that a model keeps for a prefix.

    `CacheConfig` raises `ConfigError` for the first kind or column that no pool stores.
    """

    model: str
    """The model's name, used in error messages."""
    keeps: tuple[KeptState, ...]

    def require_covered(self, pools: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Raise `ConfigError` for the first kind or column of state that no pool stores.

        `pools` has the kind of state and the column names of each pool. A pool stores one state, so a
        model with two states of one kind needs two pools of that kind.
        """
        free = list(pools)
        for kept in sorted(self.keeps, key=lambda each: -len(each.columns)):
            of_kind = [pool for pool in free if pool[0] == kept.kind]
            fits = [pool for pool in of_kind if set(kept.columns) <= set(pool[1])]
            if fits:
                # Of the pools that can store this state, use the one with the fewest columns, so that
                # pools with more columns remain for states that need more.
                free.remove(min(fits, key=lambda pool: len(pool[1])))
                continue
            columns = of_kind[0][1] if of_kind else None
            text = f"model {self.model!r} keeps {kept.kind} state in {kept.layers} layers"
            if columns is None:
                raise ConfigError(
                    f"{text} ({', '.join(kept.columns)}), and the cache has no pool for it; add it to"
                    " CacheConfig.components"
                )
            missing = [name for name in kept.columns if name not in columns]
            raise ConfigError(
                f"{text}, and its pages have no column {', '.join(map(repr, missing))}; add it to"
                " the layout of that pool"
            )
