"""The settings of a replay, validated once, and carried to the ranks as JSON."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import cast

from ...coordinator.bootstrap import Scalar, flatten
from ...coordinator.collective import Transport
from ...coordinator.stop_policy import StopPolicy, StopRule
from ...errors import ConfigError
from ...ranks.protocol.agreed_pools import shard_layouts
from ...ranks.protocol.config import (
    PAGES_MAX,
    TIMEOUT_S_MAX,
    CacheConfig,
    Eviction,
    NamespaceLimit,
    Timeouts,
    WritePolicy,
)
from ...ranks.protocol.outside import Control
from ...small_engine.profile import STATES_PER_CHECKPOINT
from ...small_engine.profiles import find_profile
from ...storage_backends.uri import parse_uri
from .option_values import check_choice, check_number, check_store, option

DEVICES = ("cpu", "cuda")

SEED_MAX = (1 << 63) - 1
COMPONENT_POOLS = (
    "window_device_pages",
    "window_host_pages",
    "state_device_pages",
    "state_host_pages",
)
"""The settings for pools that only some profiles have; derived unless they are given."""
_MAY_DIFFER = frozenset(
    {"device_pages", "host_pages", *COMPONENT_POOLS, "report", "timeline", "table"}
)
"""Settings that ranks may differ in: the smallest pool counts, and only rank 0 reports."""

RANKS_MAX = 1024
_PORT_MAX = 65535
_PAGE_TOKENS_MAX = 1 << 16
_POOL_PAGES_MAX = PAGES_MAX // STATES_PER_CHECKPOINT
"""With more, a pool that is derived from this one would have more than `PAGES_MAX`."""
_BOUNDS: Mapping[str, tuple[int, float]] = {
    "ranks": (1, RANKS_MAX),
    "requests": (1, inf),
    "concurrency": (1, inf),
    "namespaces": (0, inf),
    "quota_pages": (1, _POOL_PAGES_MAX),
    "page_tokens": (1, _PAGE_TOKENS_MAX),
    "device_pages": (1, _POOL_PAGES_MAX),
    "host_pages": (1, _POOL_PAGES_MAX),
    "prefill_tokens": (1, inf),
    "output_tokens_max": (0, inf),
    "seed": (0, SEED_MAX),
    "depth": (0, 1),
    "metrics_port": (1, _PORT_MAX - RANKS_MAX),
}
_CHOICES: Mapping[str, Collection[str]] = {
    "stop_policy": [each.value for each in StopRule],
    "write_policy": [each.value for each in WritePolicy],
    "eviction": [each.value for each in Eviction],
    "transport": [each.value for each in Transport],
    "device": DEVICES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Says what to replay, on how many ranks, with which cache. Sizes in units of their names."""

    trace: str | None = None
    """The trace's path, or None for the built-in workload."""
    ranks: int = 2
    requests: int | None = None
    """How many requests to take; None stands for all."""
    concurrency: int = 8
    """Requests in the system at a time."""
    namespaces: int = 1
    """How many namespaces, as tenants or salts have them, requests are spread over in turn; 0 gives
    each request one of its own."""
    quota_pages: int | None = None
    """Pages that each namespace may keep on the device and in host memory; None stands for no limit."""
    profile: str = "llama"
    page_tokens: int = 64
    device_pages: int = 8192
    host_pages: int = 65536
    window_device_pages: int | None = None
    """The size of the sliding-window pool; None derives it from `device_pages`, as the next three."""
    window_host_pages: int | None = None
    state_device_pages: int | None = None
    state_host_pages: int | None = None
    store: str | None = field(default=None, repr=False)
    stop_policy: str = StopRule.TIMEOUT.value
    write_policy: str = WritePolicy.WRITE_THROUGH.value
    eviction: str = Eviction.LRU.value
    verify: bool = True
    seed: int = 0
    depth: int = 1
    transport: str = Transport.AUTO.value
    output_tokens_max: int = 16
    """Most output tokens of a request; 0 stands for as many as the trace says."""
    prefill_tokens: int = 8192
    """Prompt tokens that a step computes at most."""
    device: str = "cpu"
    round_timeout_s: float = 60.0
    metrics_port: int | None = None
    """The port of rank 0's metrics on loopback; each rank's is its own number beyond it."""
    control: str | None = None
    """The Unix socket at which rank 0 takes requests of an operator, for its own user alone."""
    report: str | None = None
    """The file that rank 0 writes the report to."""
    timeline: str | None = None
    """The file that rank 0 writes the timelines of all ranks to; a rank keeps its own if it has one."""
    table: bool = True
    """Whether rank 0 prints the report as a table."""

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, least, most)
        for name, known in _CHOICES.items():
            check_choice(name, getattr(self, name), known)
        if not 0 < self.round_timeout_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"--round-timeout-s is {self.round_timeout_s}, must be more than 0 and at most"
                f" {TIMEOUT_S_MAX:.0f}"
            )
        if self.store is not None:
            check_store(self.store)
        if self.timeline is not None and self.timeline == self.report:
            raise ConfigError(f"--timeline and --report are both {self.timeline}; name two files")
        self._check_component_pools()
        config = self.cache_config()
        try:
            shard_layouts(config, 0, self.ranks)
        except ConfigError as error:
            raise ConfigError(f"--ranks is {self.ranks}: {error}") from error

    def cache_config(self) -> CacheConfig:
        """Return the settings of each rank's cache."""
        profile = find_profile(self.profile)
        return CacheConfig(
            model=f"{profile.model} scaled",
            layout=profile.layout(self.page_tokens),
            components=profile.components(
                self.page_tokens, self.device_pages, self.host_pages, self._given_pools()
            ),
            description=profile.description(),
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            limits=self._limits(),
            store=None if self.store is None else with_replay_durability(self.store),
            stop_policy=StopPolicy(rule=StopRule(self.stop_policy)),
            write_policy=WritePolicy(self.write_policy),
            eviction=Eviction(self.eviction),
            pipeline_depth=self.depth,
            transport=Transport(self.transport),
            timeouts=Timeouts(round_s=self.round_timeout_s),
            control=None if self.control is None else Control(path=self.control),
        )

    def _limits(self) -> tuple[NamespaceLimit, ...]:
        if self.quota_pages is None:
            return ()
        each = NamespaceLimit(
            namespace="*", device_pages=self.quota_pages, host_pages=self.quota_pages
        )
        return (each,)

    def fingerprint(self) -> Mapping[str, Scalar]:
        """Return what must be equal on every rank, by name."""
        return {name: value for name, value in flatten(self).items() if name not in _MAY_DIFFER}

    def page_bytes(self) -> dict[str, int]:
        """Return how many bytes a page of each pool has on one rank, by the pool's name.

        Raises `ConfigError` if the ranks cannot divide the pages between them.
        """
        shards = shard_layouts(self.cache_config(), 0, self.ranks)
        return {pool: shard.page_bytes for pool, shard in shards.items()}

    def pool_pages(self) -> dict[str, tuple[int, int]]:
        """Return the pages on the device and on the host, by the pool's name."""
        return self.cache_config().pool_sizes()

    def pool_sizes(self) -> dict[str, int]:
        """Return the sizes of all pools that the profile has, derived or given, by setting."""
        profile = find_profile(self.profile)
        return {
            "device_pages": self.device_pages,
            "host_pages": self.host_pages,
            **profile.sizes(self.page_tokens, self.device_pages, self.host_pages),
            **self._given_pools(),
        }

    def with_sizes(self, sizes: Mapping[str, int]) -> "ReplaySettings":
        """Return the settings with these sizes in place of their own, by setting."""
        return self.from_json(json.dumps({**asdict(self), **sizes}))

    def _given_pools(self) -> dict[str, int]:
        sizes: dict[str, int | None] = {name: getattr(self, name) for name in COMPONENT_POOLS}
        return {name: pages for name, pages in sizes.items() if pages is not None}

    def _check_component_pools(self) -> None:
        least = find_profile(self.profile).least_sizes(self.page_tokens)
        for name, pages in self._given_pools().items():
            if name not in least:
                raise ConfigError(
                    f"{option(name)} is {pages}, and profile {self.profile!r} has no"
                    f" {name.partition('_')[0]} pool; leave it out"
                )
            check_number(name, pages, least[name], _POOL_PAGES_MAX)

    def to_json(self) -> str:
        """Return the settings as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ReplaySettings":
        """Return the settings that `to_json` wrote. Raises `ConfigError` for anything else."""
        try:
            record: object = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"settings are not JSON: {error}") from error
        known = {each.name for each in fields(cls)}
        if not isinstance(record, dict) or not known.issuperset(cast("dict[str, object]", record)):
            raise ConfigError(f"settings must be a JSON object with fields of {sorted(known)}")
        return cls(**cast("dict[str, object]", record))  # type: ignore[arg-type]


def with_replay_durability(uri: str) -> str:
    """Return the store's URI, with durability none for files unless the URI says otherwise.

    A replay can be run again; waiting for the disk would measure the disk.
    """
    parsed = parse_uri(uri)
    if parsed.scheme != "file" or "durability" in parsed.options:
        return uri
    return f"{uri}{'&' if parsed.options else '?'}durability=none"
