"""vLLM's `OffloadingConnector`, with tiers that can know the engine's configuration."""

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from ..cache_contract import EngineCacheConfig
from ..contract import EngineConfig


class LockstepOffloadingConnector(OffloadingConnector):
    """The same, but for what a tier finds as vLLM's current configuration while it is made."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: EngineCacheConfig,
    ) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
