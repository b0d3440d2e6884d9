"""Settings that a user writes into the configuration that an engine hands to a plug-in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self, cast

from msgspec import Meta

from ..coordinator.settings import AtLeastOne, Text, part_of, read_settings
from ..errors import ConfigError
from ..ranks.protocol.config import GroupSettings, Timeouts
from ..ranks.protocol.outside import Control
from ..storage_backends.registry import is_built_in, known_schemes, make_backend
from ..storage_backends.uri import RANK, parse_uri
from ..telemetry.port import PORT_MAX
from .releases import UnsupportedEngine
from .sharing import Share

ROUND_S = 600.0
"""What one rank's program does before it comes back to its engine may take minutes: a checkpoint that
it writes, weights that it loads. A rank that has died is noticed at once, whatever this is."""


@dataclass(frozen=True, kw_only=True)
class PluginSettings(GroupSettings):
    """The settings of every plug-in; equal on every rank."""

    where: ClassVar[str]
    """The place of these values, as users know it."""

    host_memory_gib: Annotated[float, Meta(gt=0, lt=1 << 20)] | None = None
    """Host memory for pages on each rank, in GiB."""
    host_pages: AtLeastOne | None = None
    """The host memory as a number of full attention's pages; not beside `host_memory_gib`."""
    model: Text | None = None
    """The model's name in keys; by default the one that the engine was given, which may be a path."""
    weights_version: Text | None = None
    """Stands for all weights in keys; if it is given, the files that hold them are not read."""
    weight_digests: Text | None = None
    """The folder in which digests of files of weights are remembered; by default the engine's cache."""
    idle_wait_s: Annotated[float, Meta(gt=0, le=1)] = 0.002
    """How long a step without anything to compute waits for storage and copies."""
    metrics_port: Annotated[int, Meta(ge=1, le=PORT_MAX)] | None = None
    """The port of rank 0's metrics on loopback, with each other rank's at its own number beyond it."""
    control: Text | None = None
    """The Unix socket at which rank 0 takes requests of an operator, for its own user alone."""
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(round_s=ROUND_S))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_memory_gib is not None and self.host_pages is not None:
            raise ConfigError("give host_memory_gib or host_pages, and not both")
        if self.store is not None:
            # Before anything is read or opened; another package's store is looked at when it opens.
            scheme = parse_uri(self.store).scheme
            if is_built_in(scheme) or scheme not in known_schemes():
                make_backend(self.store.replace(RANK, "0"))

    @classmethod
    def read(cls, given: object) -> Self:
        """Return the settings that a user has given; `ConfigError` names the key that is wrong."""
        if isinstance(given, Mapping):
            keys = cast("Mapping[str, object]", given)
            if isinstance(keys.get("timeouts"), Mapping):
                timeouts = cast("Mapping[str, object]", keys["timeouts"])
                keys = {**keys, "timeouts": {"round_s": ROUND_S, **timeouts}}
            return read_settings(cls, keys, cls.where)
        return read_settings(cls, given, cls.where)

    def require_host_memory(self) -> None:
        """Raise `ConfigError` if neither key says how much host memory there is for pages."""
        if self.host_memory_gib is None and self.host_pages is None:
            raise ConfigError(
                "give host_memory_gib, the host memory for pages on each rank in GiB, or host_pages"
            )

    def host_pages_of(self, page_bytes: int) -> int:
        """Return the number of host pages, if one of all pools together has `page_bytes` bytes."""
        if self.host_pages is not None:
            return self.host_pages
        assert self.host_memory_gib is not None
        pages = int(self.host_memory_gib * (1 << 30)) // page_bytes
        if not pages:
            raise ConfigError(
                f"{self.where}: host_memory_gib is {self.host_memory_gib:g}, and one page of this model"
                f" takes {page_bytes} bytes; give more"
            )
        return pages

    def for_cache(self) -> dict[str, Any]:
        """Return the settings that a cache has too, by name.

        An operator may ask it for everything but other weights, which the engine itself knows of.
        """
        control = None if self.control is None else Control(path=self.control, refused=("weights",))
        return {**part_of(self, GroupSettings), "control": control}


@dataclass(frozen=True, kw_only=True)
class ServingSettings(PluginSettings):
    """The further settings of the plug-ins of serving engines."""

    adapter_versions: Mapping[str, Text] = field(default_factory=dict[str, str])
    """The version that keys have for an adapter, by its name, instead of a digest of its files."""
    share: Share = Share.ALL
    """With whom pages are shared: `all` engines that compute the same, or those of one `engine`."""
    unsupported_engine: UnsupportedEngine = UnsupportedEngine.REFUSE
    """Policy for an engine of a release that the plug-in is not for: `refuse` it, or `try` it."""
