from enum import Enum
from typing import Any

class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1

class KVConnectorMetadata: ...
class KVConnectorHandshakeMetadata: ...

class KVConnectorWorkerMetadata:
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata: ...

class KVConnectorTransferResults:
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]
    def __init__(
        self,
        finished_sending: set[str] = ...,
        finished_recving: set[str] = ...,
        failed_recving: set[str] = ...,
    ) -> None: ...

class SupportsHMA: ...

class KVConnectorBase_V1:
    def __init__(
        self, vllm_config: object, role: KVConnectorRole, kv_cache_config: object
    ) -> None: ...
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None: ...
    def _get_connector_metadata(self) -> Any: ...
