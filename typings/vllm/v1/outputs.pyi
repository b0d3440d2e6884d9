from typing import Any

class KVConnectorOutput:
    def __init__(self, **fields: Any) -> None: ...

class ModelRunnerOutput:
    def __init__(
        self, req_ids: list[str], req_id_to_index: dict[str, int], **fields: Any
    ) -> None: ...
