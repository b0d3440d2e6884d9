"""Any of Lockstep's stores as a tier of vLLM's own offloading, for those who stay with its connector.

    kv_transfer_config={
        "kv_connector": "LockstepOffloadingConnector",
        "kv_connector_module_path": "lockstep.integrations.vllm.tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 30,
            "secondary_tiers": [
                {"type": "LockstepTier", "module_path": "lockstep.integrations.vllm.tier",
                 "store": "file:///mnt/kv"},
            ],
        },
    }

The connector is vLLM's `OffloadingConnector`, which beside that tells its tiers of the engine's
configuration. Under vLLM's own the tier needs a `weights_version`. `settings` says what else it may be
told. Only `tier` and `connector` need vLLM.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .connector import LockstepOffloadingConnector
    from .tier import LockstepTier

__all__ = ["LockstepOffloadingConnector", "LockstepTier"]


def __getattr__(name: str) -> object:
    # vLLM finds both under this module's name. All else can be used, and tested, without vLLM.
    if name == "LockstepTier":
        from .tier import LockstepTier  # noqa: PLC0415

        return LockstepTier
    if name == "LockstepOffloadingConnector":
        from .connector import LockstepOffloadingConnector  # noqa: PLC0415

        return LockstepOffloadingConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
