"""Checks Lockstep's settings when vLLM starts, before vLLM spawns processes or reads weights."""

from functools import wraps
from typing import Any

from vllm.v1.executor.abstract import Executor

from ..starting import ending_the_start
from .contract import EngineConfig
from .vllm_opening import read_settings

CONNECTOR = "LockstepConnector"


def check_before_the_start() -> None:
    """Check the settings in the user's process, when vLLM selects its executor; idempotent.

    vLLM resolves the connector class earlier, but does not pass the settings to it at that time.
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
