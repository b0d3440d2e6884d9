"""What SGLang's KV is, apart from the tokens: part of the key of every page (rule R16).

The weights, by what their files hold, or by a version that the user gives; and what the configuration
makes of KV, as `sharing.py` says. With the model's name and the page layout, which the cache has of its
own, they tell apart what must not share.

All ranks must come to the same, and their caches compare it when they open.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from ....page_format.page_layout import PageLayout
from ...canonical import DIGEST_CHARACTERS
from ...kv_description import KvDescription
from ...model_weights import LoadedWeights, remedy, unreadable
from ...sharing import EngineSettings, Setting, Share, kv_name
from ...weights import FileDigests, weights_digest
from .key_exclusions import EXCLUSIONS, FILES, RELEASES, RESOLVED

log = logging.getLogger(__name__)

PACKAGE = "sglang.srt"

DUMMY = "dummy"

NO_CACHE_OF_WEIGHTS = "off"

FROM_FILES = frozenset(
    {
        *("auto", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral"),
        *("gguf", "bitsandbytes", "layered", "sharded_state", "runai_streamer"),
    }
)
"""The load formats of SGLang that read files of the model's own folder, and nothing else."""


@dataclass(frozen=True)
class Resolved:
    """Holds what an engine is configured with, as it came out after all that SGLang decides itself."""

    engine_version: str
    fields: Mapping[str, Mapping[str, object]]
    """The values by namespace, as `exec.kernel`, and by name."""
    model_config: Any
    environment: Mapping[str, object]
    """The variables that the engine reads and that are set to another value than their default."""
    declared: Mapping[str, object]
    """What SGLang has for a field that is not given, by name."""

    def field(self, namespace: str, name: str) -> object:
        """Return one value; raises `ConfigError` where this SGLang has no such field."""
        try:
            return self.fields[namespace][name]
        except KeyError:
            raise ConfigError(
                f"SGLang {self.engine_version} has no {name} among its {namespace} settings, by which"
                " Lockstep tells KV apart; use a version of SGLang that Lockstep knows"
            ) from None

    def reloaded(self, path: str, load_format: str) -> "Resolved":
        """Return the same engine with other weights, which it has read from `path` while it ran."""
        read = {"model_path": path, "load_format": load_format, "revision": None}
        model = {
            **self.fields["model"],
            **read,
            "checkpoint_engine_wait_weights_before_ready": False,
        }
        return replace(self, fields={**self.fields, "model": model})


@dataclass(frozen=True, slots=True)
class Update:
    """What is known of weights that come to a running engine."""

    version: str | None = None
    """The user's name for them."""
    path: str | None = None
    """Where they are read, if they are."""
    load_format: str | None = None
    """How they are read there."""


def kv_identity(
    resolved: Resolved, weights: str, layouts: Mapping[str, PageLayout], share: Share
) -> str:
    """Return what the key of every page has for this engine's KV; `layouts` are its pages by pool.

    Raises `ConfigError` for what has no canonical bytes.
    """
    model = resolved.model_config
    description = KvDescription.of(model.hf_config, model.dtype, layouts)
    return kv_name(weights, description, settings_of(resolved), share, log)


def settings_of(resolved: Resolved) -> EngineSettings:
    """Return what the engine is configured with."""
    found = [
        *(each for namespace in resolved.fields for each in _settings(resolved, namespace)),
        *(Setting(name, name, value, MISSING) for name, value in resolved.environment.items()),
    ]
    return _engine_settings(resolved, found)


def adapter_options(resolved: Resolved) -> str:
    """Return what may change how this engine applies an adapter, as a digest."""
    return _engine_settings(resolved, [*_settings(resolved, "lora")]).digest()


def _engine_settings(resolved: Resolved, settings: list[Setting]) -> EngineSettings:
    return EngineSettings(
        "SGLang", resolved.engine_version, RELEASES, settings, PACKAGE, EXCLUSIONS, RESOLVED
    )


def _settings(resolved: Resolved, namespace: str) -> Iterator[Setting]:
    """Yield the settings of a namespace. Of a file only counts here that there is one."""
    files = FILES.get(namespace, "").split()
    for name, value in resolved.fields[namespace].items():
        default = False if name in files else resolved.declared.get(name, MISSING)
        counted = value is not None if name in files else value
        yield Setting(name, f"{namespace}.{name}", counted, default)


def weights_of(resolved: Resolved, version: str | None, digests: FileDigests, where: str) -> str:
    """Return what the engine's weights are, those of a draft model and of files beside them included.

    The user's `version`, if there is one, stands for all of them, and nothing is read. Raises
    `ConfigError`, which says what to do, where they cannot be told; `where` is where users give a
    version.
    """
    if version is not None:
        return f"version {version}"
    field = resolved.field
    if field("model", "weight_cache_mode") != NO_CACHE_OF_WEIGHTS:
        raise ConfigError(
            "weight_cache_mode takes weights from another process, whatever it holds;"
            f" {remedy(where)}"
        )
    if field("model", "checkpoint_engine_wait_weights_before_ready"):
        raise ConfigError(
            "checkpoint_engine_wait_weights_before_ready takes weights that another process sends;"
            f" {remedy(where)}"
        )
    load_format = field("model", "load_format")
    model = field("model", "model_path"), field("model", "revision"), load_format
    found = [_loaded(resolved, model, digests, where)]
    draft = field("spec", "speculative_draft_model_path")
    if draft is not None:
        revision = field("spec", "speculative_draft_model_revision")
        drafted = field("spec", "speculative_draft_load_format") or load_format
        found.append(f"draft {_loaded(resolved, (draft, revision, drafted), digests, where)}")
    for namespace, names in FILES.items():
        for name in names.split():
            value = field(namespace, name)
            if value is not None:
                found.append(f"{name} {_content(name, str(value), digests, where)}")
    return ", ".join(found)


def _content(name: str, value: str, digests: FileDigests, where: str) -> str:
    """Return a digest of the file or folder that a field names."""
    path = Path(value).expanduser()
    try:
        if path.is_dir():
            return weights_digest(path, digests)
        return digests.of([path])[0][:DIGEST_CHARACTERS]
    except OSError as error:
        raise unreadable(f"{name} {value}", error, where) from error


def _loaded(
    resolved: Resolved, named: tuple[object, object, object], digests: FileDigests, where: str
) -> str:
    """Return what weights are that are `named` by a path, a revision and a load format."""
    path, revision, load_format = named
    if load_format == DUMMY:
        # Each rank draws the part that it holds, all of them with one seed that never changes.
        return f"dummy on {resolved.field('parallel', 'tp_size')}"
    loaded = LoadedWeights(str(path), revision, str(load_format), load_format in FROM_FILES)
    return loaded.identity(digests, where)
