"""Object names of HiCache's pages in a store; pages with the same name are interchangeable.

- SGLang's page key is a hash of all tokens up to the page's end.
- The namespace covers everything else that determines the bytes (model, weights, number formats, the
  pool's byte layout).
- The shard says which part of the model this rank holds.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgspec

from ....errors import ConfigError
from ....page_format.object_name import ObjectName
from .contract import EngineFacts, HicacheHostPool, StorageConfig

KV: Final = "kv"
"""HiCache's name of its main pool, which holds the KV of all full-attention tokens."""

_SHARDED: Final = ("mamba",)
"""Names of pools that ranks shard even if the model's KV is replicated: recurrent states."""
_DRAFTS: Final = ("draft", "draft_swa")
"""Names of pools with a draft model's KV. Their heads may be sharded even if the target model's KV is
replicated."""
_GEOMETRY: Final = (
    "page_size",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "num_mamba_layers",
    "temporal_dtype",
    "size_per_token",
)
"""Names of host-pool attributes that enter the namespace. A pool class need not have all of them."""
_NOT_IN_NAMES: Final = re.compile("[^a-z0-9.-]")


@dataclass(frozen=True, slots=True)
class PoolNames:
    """The parts of an object name that are equal for all pages of one pool on one rank."""

    namespace: str
    pool: str
    shard: str

    def of(self, keys: Sequence[str]) -> list[ObjectName]:
        """Return the object names of the pages with these keys."""
        return [ObjectName(self.namespace, key, self.pool, self.shard) for key in keys]


def pool_names(
    config: StorageConfig,
    name: str,
    pool: HicacheHostPool,
    *,
    weights_version: str,
    facts: EngineFacts,
    pieces: Sequence[int],
) -> PoolNames:
    """Return the parts of object names that are equal for all pages of a pool on one rank.

    `pieces` has the number of bytes of each piece of a page. Raises `ConfigError` if the model has no
    name.
    """
    if not config.model_name:
        raise ConfigError("the model has no name, which page keys need; give --served-model-name")
    form = [
        type(pool).__name__,
        str(getattr(pool, "storage_format_tag", None)),
        pool.layout,
        str(pool.dtype),
        str(pool.get_dummy_flat_data_page().dtype),
        list(pieces),
        [[each, repr(getattr(pool, each))] for each in _GEOMETRY if hasattr(pool, each)],
    ]
    record = ["lockstep-hicache-1", config.model_name, weights_version, sorted(facts.items()), form]
    is_split = not config.is_mla_model or name in _SHARDED
    if name in _DRAFTS and hasattr(pool, "v_head_dim"):
        is_split = True
    tp = f"tp{config.tp_rank}of{config.tp_size}" if is_split else "tp-all"
    return PoolNames(
        namespace=sha256(msgspec.msgpack.encode(record)).hexdigest(),
        pool=_NOT_IN_NAMES.sub("-", f"hicache-{name}"),
        shard=(
            f"{tp}.pp{config.pp_rank}of{config.pp_size}"
            f".cp{config.attn_cp_rank}of{config.attn_cp_size}"
        ),
    )
