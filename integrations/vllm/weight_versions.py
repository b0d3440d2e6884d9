"""How the connector hears which version vLLM is told that its weights are.

vLLM keeps that name in its engine core (`finish_weight_update(weight_version=...)`,
`update_weight_version`), puts it into outputs, and tells no connector. The engine core is in the
process of the scheduler in every form in which vLLM runs, so it is there that the call is listened to.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from vllm.v1.engine.core import EngineCore

Connector = TypeVar("Connector")


def hear_weight_versions(kind: type[Connector], tell: Callable[[Connector, str], None]) -> None:
    """Tell a scheduler's connector of this kind each version that its engine is told from now on.

    vLLM does what it does without it. May be called again.
    """
    engine: Any = EngineCore
    set_version = engine.set_weight_version
    if hasattr(set_version, "__wrapped__"):
        return

    @wraps(set_version)
    def told(core: Any, weight_version: str) -> None:
        set_version(core, weight_version)
        connector = core.scheduler.connector
        if isinstance(connector, kind):
            tell(connector, weight_version)

    engine.set_weight_version = told
