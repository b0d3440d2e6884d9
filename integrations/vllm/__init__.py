"""Lockstep's plug-in for vLLM 0.32 and 0.33.

vLLM loads the plug-in by name, from its own configuration:

    LLM(
        model=..., tensor_parallel_size=2, distributed_executor_backend="external_launcher",
        kv_transfer_config={
            "kv_connector": "LockstepConnector",
            "kv_connector_module_path": "lockstep.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_memory_gib": 16, "store": "file:///mnt/kv"},
        },
    )

`connector_settings` defines the extra configuration. Only `connector` and modules that it needs import
vLLM.
"""

from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    from .connector import LockstepConnector

__all__ = ["LockstepConnector"]


def __getattr__(name: str) -> object:
    # Import the connector only on access, so that other modules can be imported without vLLM.
    if name == "LockstepConnector":
        from ..starting import ending_the_start, log_as  # noqa: PLC0415

        try:
            from .connector import LockstepConnector  # noqa: PLC0415
            from .early_checks import check_before_the_start  # noqa: PLC0415
        except ImportError as error:
            with ending_the_start():
                _refuse_other_release(error)
            raise
        log_as("vllm")
        check_before_the_start()
        return LockstepConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refuse_other_release(error: ImportError) -> None:
    """Raise `ConfigError` if the plug-in's import has failed under an unsupported release of vLLM."""
    from vllm import __version__  # noqa: PLC0415

    from ..releases import is_release  # noqa: PLC0415
    from .key_exclusions import RELEASES  # noqa: PLC0415

    if not is_release(__version__, RELEASES):
        raise ConfigError(
            f"Lockstep's plug-in supports vLLM {' and '.join(RELEASES)}, and cannot be imported under"
            f" vLLM {__version__}: {error}"
        ) from error
