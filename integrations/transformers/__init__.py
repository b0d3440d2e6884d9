"""Lockstep for Transformers: `generate()` reuses prefixes that earlier requests have computed.

    from lockstep.integrations.transformers import LockstepCache

    with LockstepCache.open(model, host_memory_gib=4, store="file:///mnt/kv") as cache:
        with cache.reuse(input_ids) as past:
            output = model.generate(input_ids, past_key_values=past)

Works in one process, or under torchrun with `tp_plan="auto"` if every rank makes the same calls.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lockstep_cache import LockstepCache
    from .past import ReusedPast

__all__ = ["LockstepCache", "ReusedPast"]


def __getattr__(name: str) -> object:
    # Import the cache only on access, so that its settings can be imported without Transformers.
    if name == "LockstepCache":
        from .lockstep_cache import LockstepCache  # noqa: PLC0415

        return LockstepCache
    if name == "ReusedPast":
        from .past import ReusedPast  # noqa: PLC0415

        return ReusedPast
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
