"""The entry point by which each of SGLang's processes finds Lockstep.

SGLang loads this module whenever Lockstep is installed, even if the user does not select Lockstep.
Other modules are therefore imported only when SGLang calls the functions below.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from .radix_cache import LockstepRadixCache


def register() -> None:
    """Register Lockstep's radix-cache backend and its hooks with SGLang."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415

    from .hooks import NAME, register_hooks  # noqa: PLC0415

    register_radix_cache_backend(NAME, make)
    register_hooks()


def make(ctx: "TreeCacheBuildContext") -> "LockstepRadixCache":
    """Create one rank's radix cache. SGLang calls it in the constructor of the rank's scheduler."""
    from .sglang_opening import open_radix_cache  # noqa: PLC0415

    return open_radix_cache(ctx)
