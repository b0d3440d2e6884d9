"""What an engine's KV is, as far as the tier can know it: part of the name of every chunk (rule R16).

vLLM tells its tiers the model's name and how chunks lie in memory; not the weights, nor the options
that change numbers. Under `LockstepOffloadingConnector` the tier has the engine's whole configuration,
and counts it as `LockstepConnector` does. Under vLLM's own connector a user's `weights_version` must
stand for all of it.

A chunk holds blocks as the engine's attention has arranged them, which nobody tells the scheduler. vLLM
chooses a backend by its options and by what the device can do, so that counts as well.
"""

import logging
from pathlib import Path

from vllm import __version__ as engine_version
from vllm import envs
from vllm.platforms import current_platform

from ....errors import ConfigError
from ...weights import FileDigests
from ..contract import EngineConfig
from ..kv_identity import configuration_digest, weights_of
from .settings import WHERE, TierSettings

_log = logging.getLogger("vllm.lockstep")


def identity_of(settings: TierSettings, engine: EngineConfig | None) -> str:
    """Return what stands for the weights and the options of an engine.

    Raises `ConfigError` where that cannot be told.
    """
    if engine is None:
        if settings.weights_version is None:
            raise ConfigError(
                f"{WHERE}: vLLM's OffloadingConnector does not tell a tier which weights and options"
                " its engine has. Use LockstepOffloadingConnector with kv_connector_module_path"
                " lockstep.integrations.vllm.tier, or give weights_version, a text of yours that"
                " changes with the weights and with every option that changes their KV"
            )
        return f"version {settings.weights_version}, vLLM {engine_version}, {_device()}"
    records = Path(settings.weight_digests or f"{envs.VLLM_CACHE_ROOT}/lockstep").expanduser()
    read = FileDigests(records / "weights.json", log=_log)
    weights = weights_of(engine, settings.weights_version, read)
    rest = configuration_digest(
        engine, engine_version=engine_version, environment=envs.compile_factors()
    )
    return f"{weights}/{rest}, {_device()}"


def _device() -> str:
    capability = current_platform.get_device_capability()
    able = "" if capability is None else capability.as_version_str()
    return f"{current_platform.device_type} {able}"
