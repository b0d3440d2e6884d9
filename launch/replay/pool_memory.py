"""Check that a replay's pools fit this machine's memory; the error names an option to change."""

from bisect import bisect_left
from dataclasses import fields, replace

from ...errors import ConfigError
from ...ranks.executor.host_memory import available_host_memory
from ..cli.options import option
from ..cli.replay_settings import COMPONENT_POOLS, ReplaySettings

_SIZES = ("page_tokens", "device_pages", "host_pages", *COMPONENT_POOLS)
_DEFAULTS = {each.name: each.default for each in fields(ReplaySettings)}


def check_pool_memory(settings: ReplaySettings, *, ranks_here: int) -> None:
    """Raise `ConfigError` if the pools of `ranks_here` ranks do not fit this machine's memory.

    The error names one option and the largest value with which the pools fit. Options that the user
    gave are tried first.
    """
    needed = _needed_bytes(settings) * ranks_here
    available, where = available_host_memory()
    if needed <= available:
        return
    found = (
        f"the pools of {ranks_here} rank(s) on this host need {needed / 2**30:.2f} GiB, and"
        f" {available / 2**30:.2f} GiB is available {where}"
    )
    given, others = _sizes(settings)
    for name, value in (given | others).items():
        fits = _largest_that_fits(settings, name, value, available // ranks_here)
        if fits:
            raise ConfigError(f"{option(name)} is {value}: {found}; at most {fits} fits")
    sizes = " and ".join(f"{option(name)} is {value}" for name, value in (given or others).items())
    raise ConfigError(f"{sizes}: {found}; lowering one of them is not enough")


def _needed_bytes(settings: ReplaySettings) -> int:
    """Return the bytes of host memory that one rank's pools take."""
    pages = settings.pool_pages()
    on_host = settings.device == "cpu"
    return sum(
        page_bytes * (pages[pool][1] + (pages[pool][0] if on_host else 0))
        for pool, page_bytes in settings.page_bytes().items()
    )


def _sizes(settings: ReplaySettings) -> tuple[dict[str, int], dict[str, int]]:
    """Return the settings that determine pool sizes: (settings given by the user, the others)."""
    sizes = {name: getattr(settings, name) for name in _SIZES}
    given = {name: size for name, size in sizes.items() if size != _DEFAULTS[name]}
    return given, {name: size for name, size in sizes.items() if name not in given and size}


def _largest_that_fits(settings: ReplaySettings, name: str, value: int, room: int) -> int:
    """Return the largest value below `value` with which a rank's pools fit `room` bytes, or 0."""

    def needed(size: int) -> int | None:
        try:
            return _needed_bytes(replace(settings, store=None).with_sizes({name: size}))
        except ConfigError:
            # A pool of this size is invalid, because it cannot hold a whole window.
            return None

    largest = bisect_left(range(1, value), True, key=lambda size: (needed(size) or 0) > room)
    return largest if largest and needed(largest) is not None else 0
