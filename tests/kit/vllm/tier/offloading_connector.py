"""The scheduler's half of vLLM's offloading connector with Lockstep's tier, made as an engine makes it.

Imports vLLM, so it is imported where a test runs and not where it is collected.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from lockstep.integrations.vllm.tier.names import ChunkNames

LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
BLOCKS = 8
OURS = "lockstep.integrations.vllm.tier"


@dataclass
class Wanted:
    """What a user starts an engine with."""

    model: Path
    digests: Path
    connector: str = "LockstepOffloadingConnector"
    tier: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    def transfer(self) -> KVTransferConfig:
        """The connector's configuration."""
        module = OURS if self.connector.startswith("Lockstep") else None
        tier = {
            "type": "LockstepTier",
            "module_path": OURS,
            "store": "memory://",
            "weight_digests": str(self.digests),
            **self.tier,
        }
        return KVTransferConfig(
            kv_connector=self.connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 1 << 20,
                "secondary_tiers": [tier],
                **self.extra,
            },
        )


def named(wanted: Wanted) -> ChunkNames:
    """Start the scheduler's half and end it; return how it names chunks."""
    arguments = {
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "dtype": "float32",
        "block_size": 32,
        **wanted.arguments,
    }
    engine = EngineArgs(
        model=str(wanted.model), kv_transfer_config=wanted.transfer(), **arguments
    ).create_engine_config()
    connector: Any = KVConnectorFactory.create_connector(
        engine, KVConnectorRole.SCHEDULER, _pages(engine.parallel_config.tensor_parallel_size)
    )
    try:
        (tier,) = connector.connector_scheduler.manager.secondary_tiers
        names = tier._names
        assert isinstance(names, ChunkNames)
        return names
    finally:
        connector.shutdown()


def _pages(ranks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=32, num_kv_heads=2 // ranks, head_size=16, dtype=torch.float32
    )
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * BLOCKS * len(LAYERS),
        layers=LAYERS,
        layer_stride=page * BLOCKS,
        block_stride=page,
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
    )
