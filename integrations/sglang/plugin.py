"""The entry point by which SGLang finds Lockstep, in each of its processes.

SGLang calls `register` wherever Lockstep is installed, whether it is asked for or not, so nothing is
imported here before it is.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from .radix_cache import LockstepRadixCache


def register() -> None:
    """Offer Lockstep as a radix cache under its name."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415

    from .hooks import NAME, register_hooks  # noqa: PLC0415

    register_radix_cache_backend(NAME, make)
    register_hooks()


def make(ctx: "TreeCacheBuildContext") -> "LockstepRadixCache":
    """Make one rank's cache; SGLang calls it in the constructor of the rank's scheduler."""
    from .opening import open_radix_cache  # noqa: PLC0415

    return open_radix_cache(ctx)
