from collections.abc import Callable, Mapping

VLLM_CACHE_ROOT: str
environment_variables: Mapping[str, Callable[[], object]]

def compile_factors() -> dict[str, object]: ...
def is_set(name: str) -> bool: ...
