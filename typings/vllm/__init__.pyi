from typing import Any

__version__: str

class LLM:
    llm_engine: Any
    def __init__(self, **arguments: Any) -> None: ...
    def generate(
        self, prompts: list[dict[str, Any]], sampling_params: SamplingParams, *, use_tqdm: bool
    ) -> list[Any]: ...
    def reset_prefix_cache(self, *, reset_connector: bool = ...) -> bool: ...

class SamplingParams:
    def __init__(self, **arguments: Any) -> None: ...
