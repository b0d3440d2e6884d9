"""The description of a model: all that it keeps for a prefix, so that a cache forgets nothing.

A cache that restores the KV of a prefix and not its recurrent state, or its keys without the sparse
attention's index, gives the engine a prefix that looks whole and is not. So an engine describes its
model, and a configuration that does not cover all of it is refused when it is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...coordinator.settings import Settings
from ...errors import ConfigError

FULL_ATTENTION = "full_attention"
"""The kind of state that every model has."""


@dataclass(frozen=True, kw_only=True)
class KeptState(Settings):
    """One kind of state, of some layers: what exists for each token, or at some positions."""

    kind: str
    """`full_attention`, `sliding_window` or `recurrent`."""
    layers: int
    """How many layers have it; said where it is missing, and compared with nothing."""
    columns: tuple[str, ...]
    """The tensors that make it up: `k` and `v`, `latent`, `index_k`, `conv`, ..."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription(Settings):
    """Everything that a model keeps for a prefix.

    Given to `CacheConfig`, which refuses by name what no pool and column of its own holds.
    """

    model: str
    """Named in the errors."""
    keeps: tuple[KeptState, ...]

    def require_covered(self, pools: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Raise `ConfigError` for the first kind or column that no pool holds.

        `pools` has the kind of state and the column names of each pool. A pool holds one of the
        states that the model keeps, and of several of a kind each has a pool of its own.
        """
        free = list(pools)
        for kept in sorted(self.keeps, key=lambda each: -len(each.columns)):
            of_kind = [pool for pool in free if pool[0] == kept.kind]
            fits = [pool for pool in of_kind if set(kept.columns) <= set(pool[1])]
            if fits:
                # The one with the least to spare, so that a larger one is left for who needs it.
                free.remove(min(fits, key=lambda pool: len(pool[1])))
                continue
            columns = of_kind[0][1] if of_kind else None
            said = f"model {self.model!r} keeps {kept.kind} state in {kept.layers} layers"
            if columns is None:
                raise ConfigError(
                    f"{said} ({', '.join(kept.columns)}), and the cache has no pool for it; add it to"
                    " CacheConfig.components"
                )
            missing = [name for name in kept.columns if name not in columns]
            raise ConfigError(
                f"{said}, and its pages have no column {', '.join(map(repr, missing))}; add it to"
                " the layout of that pool"
            )
