"""The entry point by which SGLang finds Lockstep, in each of its processes.

SGLang calls `register` whenever Lockstep is installed, even if it is not selected. Therefore this
module imports nothing heavy until then.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from .radix_cache import LockstepRadixCache


def register() -> None:
    """Register Lockstep as a radix-cache backend, and its hooks."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415

    from .hooks import NAME, register_hooks  # noqa: PLC0415

    register_radix_cache_backend(NAME, make)
    register_hooks()


def make(ctx: "TreeCacheBuildContext") -> "LockstepRadixCache":
    """Create one rank's cache; SGLang calls it in the constructor of the rank's scheduler."""
    from .sglang_opening import open_radix_cache  # noqa: PLC0415

    return open_radix_cache(ctx)
