"""User settings of Lockstep under SGLang: HiCache's flags, and keys of its extra configuration.

HiCache's flags keep their meaning: the size of host memory, the write policy, and when a request stops
waiting for storage. `--hicache-storage-backend-extra-config` holds the settings that have no flag.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from msgspec import Meta

from ....coordinator.stop_policy import StopPolicy, StopRule, StopTime
from ....coordinator.validated_settings import Count, Settings, Text, read_settings
from ....errors import ConfigError
from ....ranks.protocol.config import WritePolicy
from ...plugin_settings import ServingSettings

WHERE = "--hicache-storage-backend-extra-config"

BACKEND = "dynamic"
"""The value of `--hicache-storage-backend` that users must set if Lockstep has a store."""

log = logging.getLogger(__name__)

FORMER_KEYS = {"witness": "compare_batches"}
"""Renamed keys of the extra configuration: maps the former name to the present name."""
NAMES_A_BACKEND = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys of the extra configuration by which SGLang finds a HiCache backend; Lockstep ignores them."""


@dataclass(frozen=True, kw_only=True)
class Flags(Settings):
    """SGLang's command-line flags for HiCache, with SGLang's defaults filled in."""

    hicache_ratio: Annotated[float, Meta(gt=0, le=1e6)] | None
    """Ratio of host pages to device pages; used only if the user gives no host memory size."""
    hicache_size: Count
    """Host memory for pages on each rank, in GB; 0 means that `hicache_ratio` sets the size."""
    hicache_write_policy: WritePolicy
    hicache_host_memory_mode: Literal["cache"]
    """HiCache's mode of using host memory; Lockstep supports only the mode `cache`."""
    hicache_storage_backend: str | None
    hicache_storage_backend_extra_config: str | None
    hicache_storage_prefetch_policy: StopRule

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hicache_storage_backend not in {None, BACKEND}:
            raise ConfigError(
                f"hicache_storage_backend is {self.hicache_storage_backend!r}, a HiCache"
                f" backend; give {BACKEND!r}, and the URI of a Lockstep store as 'store' in {WHERE}"
            )
        if self.hicache_write_policy is WritePolicy.WRITE_BACK:
            raise ConfigError(
                "hicache_write_policy is 'write_back': SGLang's tree does not report the tokens of a"
                " page that it evicts, so the page cannot be copied then; use"
                " 'write_through_selective'"
            )


@dataclass(frozen=True, kw_only=True)
class ExtraSettings(ServingSettings):
    """The keys of HiCache's extra configuration that Lockstep reads; equal on every rank."""

    where: ClassVar[str] = WHERE

    compare_batches: bool = False
    """Whether ranks compare their batches before each forward pass. Different batches are an error."""
    prefetch_threshold: Count = 0
    """A request is prefetched only if at least this number of its tokens is not on the device."""
    prefetch_timeout_base: StopTime | None = None
    """The part of a prefetch's timeout, in seconds, that does not depend on the prefetch's length. It
    becomes `base_s` of the stop policy, and is not allowed if the user gives `stop_policy`."""
    prefetch_timeout_per_ki_token: StopTime | None = None
    """The seconds that each 1,024 tokens add to a prefetch's timeout. They become `per_ki_token_s` of
    the stop policy, and are not allowed if the user gives `stop_policy`."""


@dataclass(frozen=True, kw_only=True)
class _AttachSettings(Settings):
    """The extra configuration that an operator may send to attach a store to a running engine."""

    store: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoolSize:
    """Size of one device pool on one rank."""

    device_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """All user settings of the plug-in under SGLang; equal on every rank."""

    plugin: ExtraSettings
    flags: Flags

    def host_pages(self, pools: Mapping[str, DevicePoolSize], main: str) -> dict[str, int]:
        """Return each pool's number of host pages, in proportion to the pool's device pages.

        The user's `host_pages` counts pages of the pool `main`. Every pool gets at least one page.
        """
        settings, device = self.plugin, pools[main].device_pages
        size_gb = self.flags.hicache_size
        # Use a default if the ratio is None. This is rare, because SGLang fills in its own default
        # before it creates a cache.
        ratio = 2.0 if self.flags.hicache_ratio is None else self.flags.hicache_ratio
        if settings.host_pages is not None:
            ratio = settings.host_pages / device
        elif settings.host_memory_gib is not None or size_gb:
            gib = settings.host_memory_gib
            nbytes = size_gb * 10**9 if gib is None else int(gib * (1 << 30))
            ratio = nbytes / sum(each.device_pages * each.page_bytes for each in pools.values())
            if int(ratio * device) < 1:
                raise ConfigError(
                    f"{nbytes} bytes of host memory are less than one page of this model"
                    f" ({pools[main].page_bytes} bytes and its share of the other pools); raise"
                    " --hicache-size or host_memory_gib"
                )
        # Add the epsilon to a quotient, so that a floating-point error cannot lower an exact number of
        # pages by one.
        return {
            name: max(1, math.floor(ratio * each.device_pages + 1e-6))
            for name, each in pools.items()
        }


def parse(resolved: object) -> SglangSettings:
    """Return the settings; raise `ConfigError` with the invalid flag or key.

    `resolved` has SGLang's flags as attributes, with defaults filled in. If the extra configuration is
    `@path`, that JSON file is read.
    """
    found = {each.name: getattr(resolved, each.name) for each in fields(Flags)}
    flags = read_settings(Flags, found, "SGLang's flags")
    extra = extra_config(flags.hicache_storage_backend_extra_config)
    plugin = ExtraSettings.read(_ours(extra))
    if plugin.store is not None and flags.hicache_storage_backend is None:
        raise ConfigError(
            f"{WHERE} names a store, but SGLang requests prefetches only with"
            f" --hicache-storage-backend {BACKEND}; add it"
        )
    times = {
        "base_s": plugin.prefetch_timeout_base,
        "per_ki_token_s": plugin.prefetch_timeout_per_ki_token,
    }
    given = {name: time_s for name, time_s in times.items() if time_s is not None}
    if "stop_policy" not in extra:
        policy = StopPolicy(rule=flags.hicache_storage_prefetch_policy, **given)
        plugin = replace(plugin, stop_policy=policy)
    elif given:
        raise ConfigError(
            f"{WHERE}: give either stop_policy, or prefetch_timeout_base and"
            " prefetch_timeout_per_ki_token"
        )
    return SglangSettings(plugin=plugin, flags=flags)


def store_to_attach(
    backend: str, given: str | None, policies: Mapping[str, tuple[str | None, str]]
) -> str:
    """Return the URI of the store that an operator wants to attach to a running engine.

    `policies` maps each policy's name to (requested value, value at startup). Raises `ConfigError` if
    the request would change a policy or any other setting.
    """
    if backend != BACKEND:
        raise ConfigError(f"the storage backend is {backend!r}, must be {BACKEND!r}")
    # Do not accept `@path` here, because the file could differ between ranks.
    extra = _parsed(WHERE, given or "{}")
    store = read_settings(_AttachSettings, _ours(extra), WHERE).store
    for name, (requested, started) in policies.items():
        if requested not in {None, started}:
            raise ConfigError(f"{name} is {requested!r}, must stay {started!r} as at startup")
    return store


def _ours(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the extra configuration without SGLang's own keys, with former names replaced.

    Logs a warning for a former name. Raises `ConfigError` if a key is given under both names.
    """
    ours = {key: value for key, value in extra.items() if key not in NAMES_A_BACKEND}
    for former, name in FORMER_KEYS.items():
        if former not in ours:
            continue
        if name in ours:
            raise ConfigError(
                f"{WHERE}: {former!r} is the former name of {name!r}; give {name!r} alone"
            )
        log.warning(
            "%s: %r is now %r; the former name is removed in the next release", WHERE, former, name
        )
        ours[name] = ours.pop(former)
    return ours


def extra_config(given: str | None) -> Mapping[str, Any]:
    """Parse the extra configuration; `given` is JSON, or `@` and the path of a JSON file."""
    if not given:
        return {}
    if not given.startswith("@"):
        return _parsed(WHERE, given)
    path = Path(given[1:]).expanduser()
    where = f"{WHERE}: {path}"
    try:
        return _parsed(where, path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _parsed(where: str, given: str) -> Mapping[str, Any]:
    try:
        values = cast("object", json.loads(given))
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is a {type(values).__name__}, must be an object of keys and values"
        )
    return cast("Mapping[str, Any]", values)
