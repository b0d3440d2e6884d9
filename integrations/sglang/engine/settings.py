"""What a user may tell Lockstep under SGLang: HiCache's own flags, and keys of its extra configuration.

The flags keep their meaning: how much host memory, when a page is copied there, when a request stops
waiting for storage. The extra configuration, `--hicache-storage-backend-extra-config`, adds what
HiCache has no flag for.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from ....coordinator.stop_policy import StopPolicy, StopRule
from ....errors import ConfigError
from ....ranks.protocol.config import CacheConfig, WritePolicy
from ...settings import (
    PluginSettings,
    integer,
    mapping,
    number,
    one_of,
    read,
    require_known,
    text,
    truth,
)

WHERE = "--hicache-storage-backend-extra-config"

BACKEND = "dynamic"
"""The storage backend that SGLang must be told of, so that it asks for prefetches."""

NAMES_A_BACKEND = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys by which SGLang would find a backend of HiCache's. They may stay where they are."""

OWN = (
    "witness",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    *NAMES_A_BACKEND,
)
"""Keys that other engines do not have."""


class Flags(Protocol):
    """The flags of SGLang's that speak of HiCache, as it has resolved them."""

    hicache_ratio: float | None
    hicache_size: int
    hicache_write_policy: str
    hicache_host_memory_mode: str
    hicache_storage_backend: str | None
    hicache_storage_backend_extra_config: str | None
    hicache_storage_prefetch_policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How large one pool is on the device of one rank."""

    device_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Everything that a user has said; equal on every rank."""

    plugin: PluginSettings
    write_policy: WritePolicy
    host_ratio: float
    """Host pages for each device page, where no size is given."""
    host_size_gb: int
    """Host memory for pages on each rank in GB; 0 where the ratio counts."""
    prefetch_threshold_tokens: int = 0
    """A request asks storage only for more tokens than are on the device by at least so many."""
    witness: bool = False
    """Whether ranks compare each batch before any of them computes it."""

    def host_pages(self, pools: Mapping[str, PoolSize], main: str) -> dict[str, int]:
        """Return the host pages of each pool, in the proportions that they have on the device.

        `main` is the pool that `host_pages` counts. Every pool has one at least.
        """
        settings, device = self.plugin, pools[main].device_pages
        ratio = self.host_ratio
        if settings.host_pages is not None:
            ratio = settings.host_pages / device
        elif settings.host_memory_gib is not None or self.host_size_gb:
            gib = settings.host_memory_gib
            nbytes = self.host_size_gb * 10**9 if gib is None else int(gib * (1 << 30))
            ratio = nbytes / sum(each.device_pages * each.page_bytes for each in pools.values())
            if int(ratio * device) < 1:
                raise ConfigError(
                    f"{nbytes} bytes of host memory hold no page of this model, which takes"
                    f" {pools[main].page_bytes} bytes and its share of the other pools; raise"
                    " --hicache-size, or host_memory_gib"
                )
        # An exact number of pages must not come out one too small.
        return {
            name: max(1, math.floor(ratio * each.device_pages + 1e-6))
            for name, each in pools.items()
        }


def parse(flags: Flags) -> SglangSettings:
    """Return the settings; raises `ConfigError` with the flag or the key that is wrong.

    Reads the file that the extra configuration may name by `@path`.
    """
    if flags.hicache_host_memory_mode != "cache":
        raise ConfigError(
            f"--hicache-host-memory-mode is {flags.hicache_host_memory_mode!r}: Lockstep keeps pages in"
            " host memory; leave it at 'cache'"
        )
    if flags.hicache_storage_backend not in {None, BACKEND}:
        raise ConfigError(
            f"--hicache-storage-backend is {flags.hicache_storage_backend!r}, which is a store of"
            f" HiCache's; give {BACKEND!r}, and the store's URI as 'store' in {WHERE}"
        )
    extra = extra_config(flags.hicache_storage_backend_extra_config)
    values = read(WHERE, extra, OWN)
    own = {key: values.pop(key) for key in OWN if key in values}
    if values.get("store") is not None and flags.hicache_storage_backend is None:
        raise ConfigError(
            f"{WHERE} names a store, and SGLang asks for prefetches only with"
            f" --hicache-storage-backend {BACKEND}; add it"
        )
    policy = _stop_policy(flags, own, values.pop("stop_policy", None))
    threshold = integer(f"{WHERE}: prefetch_threshold", own.get("prefetch_threshold", 0))
    if threshold < 0:
        raise ConfigError(f"{WHERE}: prefetch_threshold is {threshold}, must be 0 or more")
    return SglangSettings(
        plugin=replace(PluginSettings(**values), stop_policy=policy),
        write_policy=_write_policy(flags.hicache_write_policy),
        host_ratio=_ratio(flags),
        host_size_gb=flags.hicache_size,
        prefetch_threshold_tokens=threshold,
        witness=truth(f"{WHERE}: witness", own.get("witness", False)),
    )


def store_to_attach(
    backend: str,
    given: str | None,
    *,
    stop_rule: str | None,
    write_policy: str | None,
    config: CacheConfig,
) -> str:
    """Return the URI of a store that is to be attached while the engine runs.

    Raises `ConfigError` for whatever else of the configuration would be another one than at the start.
    """
    if backend != BACKEND:
        raise ConfigError(f"the storage backend is {backend!r}; Lockstep's is {BACKEND!r}")
    # A file could be another one for each rank, and they must all be told the same.
    extra = _parsed(WHERE, given or "{}")
    require_known(WHERE, extra, {"store", *NAMES_A_BACKEND})
    for name, now, other in (
        ("hicache_storage_prefetch_policy", config.stop_policy.rule, stop_rule),
        ("hicache_write_policy", config.write_policy, write_policy),
    ):
        if other not in {None, str(now)}:
            raise ConfigError(f"{name} is {other!r}, and was {str(now)!r} when the engine started")
    return text(f"{WHERE}: store", extra.get("store"))


def extra_config(given: str | None) -> Mapping[str, Any]:
    """Return the extra configuration: JSON, or `@` and the path of a file of JSON."""
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
        raise ConfigError(f"{where} is no JSON: {error}") from error
    return mapping(where, values)


def _stop_policy(flags: Flags, own: Mapping[str, Any], given: StopPolicy | None) -> StopPolicy:
    """Return when a request stops waiting: HiCache's flag and keys, or the group of ours."""
    times = {
        name: number(f"{WHERE}: {key}", own[key])
        for name, key in (
            ("base_s", "prefetch_timeout_base"),
            ("per_ki_token_s", "prefetch_timeout_per_ki_token"),
        )
        if key in own
    }
    if given is not None:
        if times:
            raise ConfigError(
                f"{WHERE}: give stop_policy or prefetch_timeout_base and"
                " prefetch_timeout_per_ki_token, and not both"
            )
        return given
    rule = one_of(
        "--hicache-storage-prefetch-policy", StopRule, flags.hicache_storage_prefetch_policy
    )
    try:
        return StopPolicy(rule=rule, **times)
    except ConfigError as error:
        raise ConfigError(f"{WHERE}: {error}") from error


def _write_policy(name: str) -> WritePolicy:
    policy = one_of("--hicache-write-policy", WritePolicy, name)
    if policy is WritePolicy.WRITE_BACK:
        raise ConfigError(
            "--hicache-write-policy is 'write_back': SGLang's tree does not say whose tokens a page has"
            " when it evicts it, so nothing could be copied then; take 'write_through_selective'"
        )
    return policy


def _ratio(flags: Flags) -> float:
    ratio = flags.hicache_ratio
    if flags.hicache_size < 0 or (ratio is not None and not 0 < ratio < math.inf):
        raise ConfigError(
            f"--hicache-ratio is {ratio} and --hicache-size {flags.hicache_size}; they must be more"
            " than 0"
        )
    # SGLang has a default of its own, and puts it there before a cache is made.
    return 2.0 if ratio is None else ratio
