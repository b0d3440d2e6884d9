"""Checks that vLLM has the classes and methods that the plug-in uses, and prints the missing ones.

This is a separate program because importing vLLM changes how a process logs, warns and exits. The
output is JSON.
"""

import inspect
import json
from importlib import import_module
from typing import Any

import vllm

from lockstep.integrations.releases import is_release
from lockstep.integrations.vllm import (
    LockstepConnector,
    block_forms,
    contract,
)

REAL = {
    contract.VllmRequest: "vllm.v1.request:Request",
    contract.Blocks: "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    contract.BlockState: "vllm.v1.core.sched.output:KVConnectorBlockState",
    contract.ScheduledStep: "vllm.v1.core.sched.output:SchedulerOutput",
    contract.TransferConfig: "vllm.config:KVTransferConfig",
    contract.ParallelConfig: "vllm.config:ParallelConfig",
    contract.ModelConfig: "vllm.config:ModelConfig",
    contract.LoadConfig: "vllm.config:LoadConfig",
    contract.PrefixCacheConfig: "vllm.config:CacheConfig",
    contract.EventsConfig: "vllm.config:KVEventsConfig",
    contract.SpeculativeConfig: "vllm.config:SpeculativeConfig",
    contract.EngineConfig: "vllm.config:VllmConfig",
    contract.PublishingEngine: "vllm.config:VllmConfig",
    contract.HashedCacheConfig: "vllm.v1.kv_cache_interface:KVCacheConfig",
    contract.TransferOutput: "vllm.v1.outputs:KVConnectorOutput",
    contract.CompilationConfig: "vllm.config:CompilationConfig",
    contract.EncoderTransferConfig: "vllm.config:ECTransferConfig",
    contract.MultiModalPosition: "vllm.multimodal.inputs:PlaceholderRange",
    block_forms.AttentionBackend: "vllm.v1.attention.backend:AttentionBackend",
    block_forms.AttentionLayer: "vllm.model_executor.layers.attention:Attention",
    contract.AttentionSpec: "vllm.v1.kv_cache_interface:AttentionSpec",
    contract.WindowSpec: "vllm.v1.kv_cache_interface:SlidingWindowSpec",
    contract.LatentSpec: "vllm.v1.kv_cache_interface:MLAAttentionSpec",
    contract.StateSpec: "vllm.v1.kv_cache_interface:MambaSpec",
    contract.BlockPool: "vllm.v1.core.block_pool:BlockPool",
    contract.CacheGroup: "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    contract.EngineCacheConfig: "vllm.v1.kv_cache_interface:KVCacheConfig",
    contract.MultiModalFeature: "vllm.multimodal.inputs:MultiModalFeatureSpec",
    contract.LoraRequest: "vllm.lora.request:LoRARequest",
}


def used(protocol: type) -> set[str]:
    return {
        *getattr(protocol, "__annotations__", {}),
        *(name for name in vars(protocol) if not name.startswith("_")),
    }


def has(real: type, name: str) -> bool:
    """Return whether a class's instances have an attribute, judged by the class and its source."""
    fields: Any = getattr(real, "__struct_fields__", ())
    return (
        hasattr(real, name)
        or name in fields
        or any(name in getattr(base, "__annotations__", {}) for base in real.__mro__)
        or f"self.{name}" in inspect.getsource(real)
    )


SINCE_0_33 = frozenset({"unregister_kv_caches"})
"""Names of the connector's methods that only vLLM 0.33 or newer calls."""


def unlike(ours: type[Any]) -> list[str]:
    """Return a line for each connector method that vLLM lacks or declares with other arguments."""
    lines: list[str] = []
    base: Any = ours.__mro__[1]
    for name, method in vars(ours).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        bases: list[Any] = list(ours.__mro__[1:])
        theirs: list[Any] = [getattr(each, name) for each in bases if hasattr(each, name)]
        if not theirs:
            if name not in SINCE_0_33 or is_release(vllm.__version__, ["0.33"]):
                lines.append(f"{base.__name__} has no method {name}")
            continue
        taken = len(inspect.signature(theirs[0]).parameters)
        if len(inspect.signature(method).parameters) != taken:
            lines.append(f"{name} takes {taken} arguments in vLLM")
    return lines


def missing() -> list[str]:
    """Return a line for each attribute or method that vLLM lacks but the plug-in needs."""
    lines: list[str] = []
    for protocol, place in REAL.items():
        module, name = place.split(":")
        real = getattr(import_module(module), name)
        lacking = [each for each in sorted(used(protocol)) if not has(real, each)]
        lines += [f"{place} has no {each}" for each in lacking]
    return lines + unlike(LockstepConnector)


def main() -> None:
    print(json.dumps(missing()))  # noqa: T201 - the test reads it.


if __name__ == "__main__":
    main()
