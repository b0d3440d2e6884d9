from typing import Any

class SamplingParams:
    def __init__(self, **arguments: Any) -> None: ...
    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None
    ) -> None: ...
