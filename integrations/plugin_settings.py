"""Plug-in settings, which users write into the engine's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self, cast

from msgspec import Meta

from ..coordinator.validated_settings import AtLeastOne, Text, part_of, read_settings
from ..errors import ConfigError
from ..ranks.protocol.config import GroupSettings, Timeouts
from ..ranks.protocol.network_config import Control
from ..storage_backends.registry import is_built_in, known_schemes, make_backend
from ..storage_backends.uri import RANK, parse_uri
from ..telemetry.port import PORT_MAX
from .releases import UnsupportedEngine
from .sharing import Share

ROUND_S = 600.0
"""Default timeout of a round, in seconds. It is longer than the time to write a checkpoint, because a
rank joins no round while it writes a checkpoint.

Dead ranks are detected at once, without waiting for this timeout.
"""


@dataclass(frozen=True, kw_only=True)
class PluginSettings(GroupSettings):
    """Settings of every plug-in; equal on every rank."""

    where: ClassVar[str]
    """Name of the place in which users write these settings, for error messages."""

    host_memory_gib: Annotated[float, Meta(gt=0, lt=1 << 20)] | None = None
    """Host memory for pages on each rank, in GiB."""
    host_pages: AtLeastOne | None = None
    """Host memory as a number of full-attention pages; mutually exclusive with `host_memory_gib`."""
    model: Text | None = None
    """Model name in page keys; by default the model name given to the engine, possibly a path."""
    weights_version: Text | None = None
    """The user's version of the weights for page keys. If given, no weight file is read for a digest.
    """
    weight_digests: Text | None = None
    """Folder for remembered digests of weight files; by default in the engine's own cache folder."""
    idle_wait_s: Annotated[float, Meta(gt=0, le=1)] = 0.002
    """Maximum seconds that a step of an idle engine waits for storage and copies."""
    metrics_port: Annotated[int, Meta(ge=1, le=PORT_MAX)] | None = None
    """Port of rank 0's metrics on the loopback interface; rank n uses this port plus n."""
    control: Text | None = None
    """Path of the Unix socket on which rank 0 accepts control requests; only rank 0's user can open
    it."""
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(round_s=ROUND_S))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_memory_gib is not None and self.host_pages is not None:
            raise ConfigError("give host_memory_gib or host_pages, but not both")
        if self.store is not None:
            # Check the store's URI before anything is opened, except the URI of a third-party backend,
            # which is checked only when that backend opens.
            scheme = parse_uri(self.store).scheme
            if is_built_in(scheme) or scheme not in known_schemes():
                make_backend(self.store.replace(RANK, "0"))

    @classmethod
    def read(cls, given: object) -> Self:
        """Return the user's settings; raise `ConfigError` with the name of an invalid key."""
        if isinstance(given, Mapping):
            keys = cast("Mapping[str, object]", given)
            if isinstance(keys.get("timeouts"), Mapping):
                timeouts = cast("Mapping[str, object]", keys["timeouts"])
                keys = {**keys, "timeouts": {"round_s": ROUND_S, **timeouts}}
            return read_settings(cls, keys, cls.where)
        return read_settings(cls, given, cls.where)

    def require_host_memory(self) -> None:
        """Raise `ConfigError` if neither `host_memory_gib` nor `host_pages` is given."""
        if self.host_memory_gib is None and self.host_pages is None:
            raise ConfigError(
                "give host_memory_gib, the host memory for pages on each rank in GiB, or host_pages"
            )

    def host_pages_of(self, page_bytes: int) -> int:
        """Return the number of host pages on a rank.

        `page_bytes` is the sum, over all pools, of the bytes of one page.
        """
        if self.host_pages is not None:
            return self.host_pages
        assert self.host_memory_gib is not None
        pages = int(self.host_memory_gib * (1 << 30)) // page_bytes
        if not pages:
            raise ConfigError(
                f"{self.where}: host_memory_gib is {self.host_memory_gib:g}, but one page of this model"
                f" takes {page_bytes} bytes; raise it"
            )
        return pages

    def for_cache(self) -> dict[str, Any]:
        """Return, by name, the settings that are passed on to the underlying cache.

        The cache refuses control requests that change the weights, because the engine itself reports
        weight changes. It accepts all other control requests.
        """
        control = None if self.control is None else Control(path=self.control, refused=("weights",))
        return {**part_of(self, GroupSettings), "control": control}


@dataclass(frozen=True, kw_only=True)
class ServingSettings(PluginSettings):
    """Settings that only the plug-ins for serving engines (vLLM and SGLang) have."""

    adapter_versions: Mapping[str, Text] = field(default_factory=dict[str, str])
    """User-given versions by adapter name; they replace digests of the adapters' files in page keys."""
    share: Share = Share.ALL
    """Which engines share pages: all engines that compute the same KV (`all`), or only equally
    configured ones (`engine`)."""
    unsupported_engine: UnsupportedEngine = UnsupportedEngine.REFUSE
    """Policy for an engine of an unsupported release: `refuse` or `try`."""
