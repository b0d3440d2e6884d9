from typing import Any

from .v1.base import KVConnectorRole

class KVConnectorFactory:
    @classmethod
    def create_connector(
        cls, config: object, role: KVConnectorRole, kv_cache_config: object
    ) -> Any: ...
