"""The settings of groups that serve a trace together, validated once, and carried to ranks as JSON."""

import json
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import cast

from ...errors import ConfigError
from ...ranks.config import TIMEOUT_S_MAX, CacheConfig
from ...ranks.disaggregation.groups.router import Role
from ...ranks.outside import Peers
from ...storage_backends.peer.engine_settings import MOONCAKE, TCP, TRANSFERS
from ...storage_backends.uri import without_secrets
from ..option_values import check_choice, check_number, check_store
from ..settings import RANKS_MAX, ReplaySettings

GROUPS_MAX = 64
SPEED_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Shape:
    """So many groups, each of so many ranks."""

    groups: int
    ranks: int

    @classmethod
    def parse(cls, text: str, option: str) -> "Shape":
        """Return the shape that `RxTP` stands for. Raises `ConfigError` for anything else."""
        groups, cross, ranks = text.partition("x")
        if not (cross and groups.isdecimal() and ranks.isdecimal()):
            raise ConfigError(
                f"{option} is {text!r}, must be GROUPSxRANKS, as 1x2 for one group of 2 ranks"
            )
        if not (1 <= int(groups) <= GROUPS_MAX and 1 <= int(ranks) <= RANKS_MAX):
            raise ConfigError(
                f"{option} is {text!r}, must be 1 to {GROUPS_MAX} groups of 1 to {RANKS_MAX} ranks"
            )
        return cls(int(groups), int(ranks))

    def __str__(self) -> str:
        """Return the shape as `parse` reads it."""
        return f"{self.groups}x{self.ranks}"


@dataclass(frozen=True, slots=True)
class Kill:
    """A group of which all ranks are killed once so many requests have been served."""

    group: str
    served: int

    @classmethod
    def parse(cls, text: str) -> "Kill":
        """Return what `GROUP@N` stands for. Raises `ConfigError` for anything else."""
        group, at, served = text.partition("@")
        if not (group and at and served.isdecimal()):
            raise ConfigError(f"--kill is {text!r}, must be GROUP@N, as prefill-0@50")
        return cls(group, int(served))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """What the ranks of one group need to know."""

    name: str
    role: str
    replay: ReplaySettings
    """The cache, the model and the engine; with the group's number of ranks."""
    directory: str
    """Where the group registers: the path of a file, or redis:// and so on (`directories`)."""
    directly: bool
    """Whether pages go from host memory to host memory, and not by the store."""
    transfer: str
    """What moves them then, as `Peers` has it."""
    ttl_s: float
    patience_s: float
    lease_s: float
    token_us: float
    """How long the forward pass takes for each token at least, in microseconds."""
    secret: str = field(default="", repr=False)
    """What all groups and the router know; needed where they are on several hosts."""

    def cache_config(self, host: str) -> CacheConfig:
        """Return the settings of the cache of a rank that others reach at `host`."""
        config = self.replay.cache_config()
        if not self.directly:
            return config
        peers = Peers(
            address=f"{host}:0",
            secret=self.secret,
            transfer=self.transfer,
            # Who asks for it is not served by something else.
            insists=self.transfer == MOONCAKE,
        )
        return replace(config, peers=peers)

    def to_json(self) -> str:
        """Return the settings as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GroupSettings":
        """Return the settings that `to_json` wrote."""
        record = cast("dict[str, object]", json.loads(text))
        replay = ReplaySettings.from_json(json.dumps(record.pop("replay")))
        return cls(replay=replay, **record)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Says what is served, by which groups, and how requests come."""

    replay: ReplaySettings
    """Trace, model, pools, store and engine, each group's alike; `concurrency` is of all together."""
    prefill: Shape
    decode: Shape
    directly: bool = True
    transfer: str = TCP
    """What moves pages that go directly, as `Peers` has it."""
    speed: float = 1.0
    """How many times faster than in the trace requests come."""
    kill: Kill | None = None
    token_us: float = 0.0
    ttl_s: float = 60.0
    """How long an offer is kept for a group that says nothing."""
    patience_s: float = 30.0
    """How long a group waits for one that says nothing."""
    lease_s: float = 10.0
    """How long the directory lists a group that does not renew its lease."""
    directory: str = ""
    """Where groups register; empty for a file of this run's own."""

    def __post_init__(self) -> None:
        if not 0 < self.speed <= SPEED_MAX:
            raise ConfigError(
                f"--speed is {self.speed:g}, must be more than 0 and at most {SPEED_MAX:g}"
            )
        check_number("token_us", self.token_us, 0, inf)
        if not 0 < self.patience_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"--patience-s is {self.patience_s:g}, must be more than 0 and at most"
                f" {TIMEOUT_S_MAX:.0f}"
            )
        for name, shape in (("--prefill", self.prefill), ("--decode", self.decode)):
            try:
                replace(self.replay, ranks=shape.ranks)
            except ConfigError as error:
                raise ConfigError(f"{name} is {shape}: {error}") from error
        check_choice("transfer", self.transfer, TRANSFERS)
        if self.transfer != TCP and not self.directly:
            raise ConfigError("--transfer is of pages that go directly; give --direct as well")
        store = self.replay.store
        if not self.directly and (store is None or not check_store(store).shared):
            named = f", and {without_secrets(store)!r} is each process's own" if store else ""
            raise ConfigError(f"without --direct the groups need a --store that all reach{named}")
        names = [each.name for each in self.groups()]
        if self.kill is not None and self.kill.group not in names:
            raise ConfigError(
                f"--kill: there is no group {self.kill.group!r}; there are {', '.join(names)}"
            )

    def groups(self, directory: str = "", secret: str = "") -> list[GroupSettings]:
        """Return the settings of all groups, those that prefill first."""
        return [
            GroupSettings(
                name=f"{role.value}-{number}",
                role=role.value,
                replay=replace(self.replay, ranks=shape.ranks),
                directory=directory,
                directly=self.directly,
                transfer=self.transfer,
                ttl_s=self.ttl_s,
                patience_s=self.patience_s,
                lease_s=self.lease_s,
                token_us=self.token_us,
                secret=secret,
            )
            for role, shape in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
            for number in range(shape.groups)
        ]
