"""Settings of a replay: validated once, and sent to the ranks as JSON."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ...coordinator.bootstrap import Scalar, flatten
from ...coordinator.stop_policy import StopPolicy, StopRule
from ...coordinator.transport import Transport
from ...coordinator.validated_settings import TIMEOUT_S_MAX
from ...errors import ConfigError
from ...ranks.protocol.agreed_pools import shard_layouts
from ...ranks.protocol.config import (
    PAGES_MAX,
    RANKS_MAX,
    CacheConfig,
    Eviction,
    NamespaceLimit,
    Timeouts,
    WritePolicy,
)
from ...ranks.protocol.network_config import Control
from ...small_engine.profile import KV_PAGES_PER_WINDOW_PAGE, STATES_PER_CHECKPOINT
from ...small_engine.profiles import PROFILES, find_profile
from ...small_engine.workload import REQUESTS_DEFAULT
from ...storage_backends.uri import parse_uri
from .options import ABSOLUTE, AT_LEAST_0, AT_LEAST_1, OF_A_GROUP, check_fields, check_store, option

COMPONENT_POOLS = (
    "window_device_pages",
    "window_host_pages",
    "state_device_pages",
    "state_host_pages",
)
"""Names of the settings for pool sizes that only some profiles have. A size that is not set is derived.
"""
_MAY_DIFFER = frozenset(
    {"device_pages", "host_pages", *COMPONENT_POOLS, "report", "timeline", "table"}
)
"""Names of settings that may differ between ranks. All ranks use the smallest pool sizes given, and
only rank 0 writes reports."""

_PORT_MAX = 65535
_POOL_PAGES_MAX = PAGES_MAX // STATES_PER_CHECKPOINT
"""Maximum size of the KV pool in pages. It keeps the sizes of the other pools, which are derived from
it, within `PAGES_MAX`."""


def _values(names: type[StrEnum]) -> list[str]:
    return [each.value for each in names]


_PAGES = Parameter(validator=Number(gte=1, lte=_POOL_PAGES_MAX))
_STATES = Parameter(
    show_default=f"{STATES_PER_CHECKPOINT} for each checkpoint that the KV pages cover"
)

Trace = Annotated[
    str | None,
    ABSOLUTE,
    Parameter(
        help="Trace to replay, JSONL or gzipped JSONL; default: the built-in workload.",
        metavar="TRACE",
    ),
]
Requests = Annotated[int | None, AT_LEAST_1]
Ranks = Annotated[int, OF_A_GROUP]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The workload, the ranks and the cache of a replay: the options of `lockstep replay`."""

    trace: Annotated[str | None, Parameter(parse=False)] = None
    """The trace's path, or None for the built-in workload."""
    ranks: Annotated[Ranks, Parameter(show_default="2; under torchrun the number of its ranks")] = 2
    """Number of ranks."""
    requests: Annotated[
        Requests,
        Parameter(show_default=f"the whole trace; {REQUESTS_DEFAULT} of the built-in workload"),
    ] = None
    """Replay only the first N requests."""
    concurrency: Annotated[int, AT_LEAST_1] = 8
    """Requests in the system at a time; the trace's timestamps are ignored."""
    namespaces: Annotated[int, AT_LEAST_0] = 1
    """Namespaces (tenants or salts) to which requests are assigned in turn; 0: one for each request."""
    quota_pages: Annotated[int | None, _PAGES, Parameter(show_default="no limit")] = None
    """Pages that each namespace may keep in L1, and in L2."""
    profile: Annotated[str, Parameter(choices=PROFILES)] = "llama"
    """Model geometry, scaled down."""
    page_tokens: Annotated[int, Parameter(validator=Number(gte=1, lte=1 << 16))] = 64
    """Tokens per page."""
    device_pages: Annotated[int, _PAGES] = 8192
    """Pages of each rank's device pool (L1)."""
    host_pages: Annotated[int, _PAGES] = 65536
    """Pages of each rank's host pool (L2)."""
    window_device_pages: Annotated[
        int | None, Parameter(show_default=f"--device-pages / {KV_PAGES_PER_WINDOW_PAGE}")
    ] = None
    """L1 pages of the sliding-window pool, if the profile has one."""
    window_host_pages: Annotated[
        int | None, Parameter(show_default=f"--host-pages / {KV_PAGES_PER_WINDOW_PAGE}")
    ] = None
    """L2 pages of the sliding-window pool."""
    state_device_pages: Annotated[int | None, _STATES] = None
    """L1 slots for recurrent states, if the profile has them."""
    state_host_pages: Annotated[int | None, _STATES] = None
    """L2 slots for recurrent states."""
    store: Annotated[str | None, Parameter(metavar="URI", show_default="no store")] = field(
        default=None, repr=False
    )
    """Store (L3), for example file:///var/kv; files are written with durability=none unless the URI
    says otherwise."""
    stop_policy: Annotated[str, Parameter(choices=_values(StopRule))] = StopRule.TIMEOUT.value
    """Stop policy: when a prefetch ends."""
    write_policy: Annotated[str, Parameter(choices=_values(WritePolicy))] = (
        WritePolicy.WRITE_THROUGH.value
    )
    """When a computed page is copied to the lower tiers."""
    eviction: Annotated[str, Parameter(choices=_values(Eviction))] = Eviction.LRU.value
    """Eviction policy: the order in which a full pool evicts pages."""
    verify: Annotated[bool, Parameter(negative="--no-verify")] = True
    """Compare every page from the cache byte by byte."""
    seed: Annotated[int, Parameter(validator=Number(gte=0, lte=sys.maxsize))] = 0
    """Seed of the built-in workload."""
    report: Annotated[str | None, ABSOLUTE, Parameter(metavar="FILE.json", show_default="none")] = (
        None
    )
    """Write the report here as JSON."""
    timeline: Annotated[
        str | None, ABSOLUTE, Parameter(metavar="FILE.json", show_default="none")
    ] = None
    """Write a timeline of all ranks here, as trace events for https://ui.perfetto.dev."""
    metrics_port: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1, lte=_PORT_MAX - RANKS_MAX), metavar="PORT", show_default="none"
        ),
    ] = None
    """Serve metrics on loopback, rank r at PORT + r; for Prometheus and `lockstep top`."""
    control: Annotated[str | None, ABSOLUTE, Parameter(metavar="SOCKET", show_default="none")] = (
        None
    )
    """Accept `lockstep ctl` requests at this Unix socket, which only its user can open."""
    depth: Annotated[int, Parameter(validator=Number(gte=0, lte=1))] = 1
    """Pipeline depth. 1: a step applies the previous step's round; 0: a step waits for its round."""
    transport: Annotated[str, Parameter(choices=_values(Transport))] = Transport.AUTO.value
    """Transport of the rounds; auto chooses by the hosts of the ranks."""
    output_tokens_max: Annotated[int, AT_LEAST_0] = 16
    """Maximum output tokens of a request (more tokens only repeat decode steps); 0: as in the trace."""
    prefill_tokens: Annotated[int, AT_LEAST_1] = 8192
    """Maximum prompt tokens that a step computes."""
    device: Annotated[str, Parameter(choices=("cpu", "cuda"))] = "cpu"
    """Device that holds L1."""
    round_timeout_s: Annotated[float, Parameter(validator=Number(gt=0, lte=TIMEOUT_S_MAX))] = 60.0
    """Timeout of a round in seconds; a round without an answer ends the group."""
    table: Annotated[bool, Parameter(parse=False)] = True
    """Whether rank 0 prints the report as a table."""

    def __post_init__(self) -> None:
        check_fields(self)
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
        """Return the configuration of each rank's cache."""
        profile, quota = find_profile(self.profile), self.quota_pages
        return CacheConfig(
            model=f"{profile.model} scaled",
            layout=profile.layout(self.page_tokens),
            components=profile.components(
                self.page_tokens, self.device_pages, self.host_pages, self._given_pools()
            ),
            description=profile.description(),
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            limits=()
            if quota is None
            else (NamespaceLimit(namespace="*", device_pages=quota, host_pages=quota),),
            store=None if self.store is None else with_replay_durability(self.store),
            stop_policy=StopPolicy(rule=StopRule(self.stop_policy)),
            write_policy=WritePolicy(self.write_policy),
            eviction=Eviction(self.eviction),
            pipeline_depth=self.depth,
            transport=Transport(self.transport),
            timeouts=Timeouts(round_s=self.round_timeout_s),
            control=None if self.control is None else Control(path=self.control),
        )

    def fingerprint(self) -> Mapping[str, Scalar]:
        """Return the settings that must be equal on every rank, by name."""
        return {name: value for name, value in flatten(self).items() if name not in _MAY_DIFFER}

    def page_bytes(self) -> dict[str, int]:
        """Return the bytes of one page on one rank, by pool name.

        Raises `ConfigError` if the pages cannot be divided among the ranks.
        """
        shards = shard_layouts(self.cache_config(), 0, self.ranks)
        return {pool: shard.page_bytes for pool, shard in shards.items()}

    def pool_pages(self) -> dict[str, tuple[int, int]]:
        """Return (device pages, host pages) by pool name."""
        return self.cache_config().pool_sizes()

    def pool_sizes(self) -> dict[str, int]:
        """Return the sizes of all pools of the profile by setting name, whether given or derived."""
        profile = find_profile(self.profile)
        return {
            "device_pages": self.device_pages,
            "host_pages": self.host_pages,
            **profile.sizes(self.page_tokens, self.device_pages, self.host_pages),
            **self._given_pools(),
        }

    def with_sizes(self, sizes: Mapping[str, int]) -> "ReplaySettings":
        """Return a copy of the settings with other pool sizes; `sizes` is by setting name."""
        return self.from_json(json.dumps({**asdict(self), **sizes}))

    def _given_pools(self) -> dict[str, int]:
        sizes: dict[str, int | None] = {name: getattr(self, name) for name in COMPONENT_POOLS}
        return {name: pages for name, pages in sizes.items() if pages is not None}

    def _check_component_pools(self) -> None:
        least = find_profile(self.profile).least_sizes(self.page_tokens)
        for name, pages in self._given_pools().items():
            if name not in least:
                raise ConfigError(
                    f"{option(name)} is {pages}, but profile {self.profile!r} has no"
                    f" {name.partition('_')[0]} pool; leave it out"
                )
            if not least[name] <= pages <= _POOL_PAGES_MAX:
                raise ConfigError(
                    f"{option(name)} is {pages}, must be from {least[name]} to {_POOL_PAGES_MAX}"
                )

    def to_json(self) -> str:
        """Return the settings as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ReplaySettings":
        """Return the settings that `to_json` wrote; raise `ConfigError` for any other text."""
        try:
            return cls(**json.loads(text))
        except (json.JSONDecodeError, TypeError) as error:
            raise ConfigError(f"not the settings of a replay: {error}") from error


def with_replay_durability(uri: str) -> str:
    """Return the store's URI; durability=none is added to a file store's URI that has no durability.

    Writes are then not synced, because syncs would dominate the measured times. A lost write only means
    that the replay must be repeated.
    """
    parsed = parse_uri(uri)
    if parsed.scheme != "file" or "durability" in parsed.options:
        return uri
    return f"{uri}{'&' if parsed.options else '?'}durability=none"
