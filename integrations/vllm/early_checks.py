"""The checks of what a user has set that vLLM makes before it starts a process or reads weights."""

from functools import wraps
from typing import Any

from vllm.v1.executor.abstract import Executor

from ..starting import ending_the_start
from .contract import EngineConfig
from .opening import read_settings

CONNECTOR = "LockstepConnector"


def check_before_the_start() -> None:
    """Check an engine's settings when vLLM chooses its executor, in the user's process; idempotent.

    vLLM looks the connector up earlier, but tells it no setting then.
    """
    executor: Any = Executor
    get_class = executor.get_class
    if hasattr(get_class, "__wrapped__"):
        return

    @wraps(get_class)
    def checked(config: EngineConfig) -> Any:
        transfer = config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            with ending_the_start():
                read_settings(config)
        return get_class(config)

    executor.get_class = staticmethod(checked)
