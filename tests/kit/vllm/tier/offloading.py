"""What the tier reads of vLLM's configuration of offloading, for tests without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Group:
    """A group of layers."""

    tokens_per_block: int = 16
    layer_names: Sequence[str] = ("layers.0", "layers.1")
    group_id: int = 0


@dataclass
class OffloadedModel:
    """A model."""

    name: str = "org/model"
    dtype: str = "bfloat16"


@dataclass
class Cache:
    """What a chunk consists of."""

    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@dataclass
class Ranks:
    """How ranks divide the model."""

    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    is_parallelism_agnostic: bool = False

    @staticmethod
    def tp(size: int, *, agnostic: bool = False) -> "Ranks":
        """Ranks of one TP group."""
        return Ranks(size, size, is_parallelism_agnostic=agnostic)


@dataclass
class Offloading:
    """The configuration."""

    parallel: Ranks = field(default_factory=Ranks)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"
    groups: Sequence[Group] = field(default_factory=lambda: [Group()])
    model: OffloadedModel = field(default_factory=OffloadedModel)
    cache: Cache = field(default_factory=Cache)
