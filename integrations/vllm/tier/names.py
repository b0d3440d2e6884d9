"""The names of chunks in a store: chunks have one name only if their bytes mean the same. Pure.

A key of vLLM's is a hash over all tokens up to the chunk's end, with a salt and the like, and the
number of its group of layers. It says nothing of the model. All else that decides the bytes is in the
namespace; how ranks divide them is in the shard.

A chunk is one row of the host memory that vLLM shares among its workers. Ranks of any TP size have the
same row, and so the same objects, where the row holds one copy of the KV: with one worker, with latent
attention on one host (`replicated_layout`), and with `canonical_layout` where vLLM can bring all layers
into it. Any other row holds the workers' parts one after the other, each with all layers: its bytes are
in another order under another TP size, whether vLLM calls them agnostic of parallelism or not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from ....page_format.object_name import ObjectName
from .contract import OffloadingConfig

FORM: Final = "lockstep-vllm-tier-1"
GROUP_BYTES: Final = 4
"""The last bytes of a key are the number of its group."""


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """Names the chunks of one engine."""

    namespace: str
    shard: str

    def of(self, keys: Sequence[bytes]) -> list[ObjectName]:
        """Return the names of the chunks with these keys."""
        return [
            ObjectName(
                self.namespace,
                _printed(key[:-GROUP_BYTES]),
                f"vllm-tier-g{int.from_bytes(key[-GROUP_BYTES:])}",
                self.shard,
            )
            for key in keys
        ]


def chunk_names(
    config: OffloadingConfig,
    identity: str,
    model: str,
    row_bytes: int,
    canonical_format: str | None,
) -> ChunkNames:
    """Return what names an engine's chunks.

    `identity` stands for its weights and its options, `model` is the model's name in keys, and
    `canonical_format` what vLLM calls the form of canonical rows.
    """
    groups = [[each.tokens_per_block, list(each.layer_names)] for each in config.groups]
    cache = config.cache
    form = [
        *[FORM, model, identity, config.model.dtype, config.kv_cache_layout],
        *[cache.tokens_per_hash, cache.blocks_per_chunk, row_bytes, groups],
    ]
    namespace = sha256(json.dumps(form).encode()).hexdigest()
    return ChunkNames(namespace, division(config, canonical_format))


def division(config: OffloadingConfig, canonical_format: str | None) -> str:
    """Return how ranks divide a row, as part of a name: alike where they have the same bytes."""
    ranks = config.parallel
    if config.canonical_layout:
        form = f"canonical-{canonical_format}"
        if ranks.is_parallelism_agnostic:
            return form
    else:
        form = "direct"
        if ranks.world_size == 1 or config.replicated_layout:
            return "one-copy"
    return (
        f"{form}.tp{ranks.tp_size}.pp{ranks.pp_size}.pcp{ranks.pcp_size}.dcp{ranks.dcp_size}"
        f".of{ranks.world_size}"
    )


def _printed(block_hash: bytes) -> str:
    # Hashes of vLLM are 32 bytes, or fewer where the user has chosen so; an object's key is not longer.
    return block_hash.hex() if 0 < len(block_hash) <= 32 else sha256(block_hash).hexdigest()
