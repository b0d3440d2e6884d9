"""The part of every page key that identifies an SGLang engine's KV, besides the tokens (rule R16).

It combines the weights (a digest of their files, or a version given by the user) with the settings that
affect KV (`sharing.py`). Page keys also contain the cache's model name and page layout. KV that must
not be shared differs in at least one of these parts.

All ranks must compute the same identity. The ranks' caches compare it when they open.
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
from ...sharing import KeyedEngineSettings, Setting, Share, kv_name
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
"""SGLang's load formats that read only files in the model's own folder."""


@dataclass(frozen=True)
class Resolved:
    """An SGLang engine's configuration, with all defaults filled in by SGLang."""

    engine_version: str
    fields: Mapping[str, Mapping[str, object]]
    """Maps each section of SGLang's configuration (such as `exec.kernel`) to its settings by name."""
    model_config: Any
    environment: Mapping[str, object]
    """Values, by name, of the environment variables that count as settings (see `environment.py`)."""
    declared: Mapping[str, object]
    """The default value of each SGLang argument, by argument name."""

    def field(self, namespace: str, name: str) -> object:
        """Return a setting's value; raise `ConfigError` if this SGLang has no such setting."""
        try:
            return self.fields[namespace][name]
        except KeyError:
            raise ConfigError(
                f"SGLang {self.engine_version} has no {name} among its {namespace} settings,"
                " which Lockstep needs to identify KV; use a version of SGLang that Lockstep supports"
            ) from None

    def reloaded(self, path: str, load_format: str) -> "Resolved":
        """Return a copy of this configuration that loads the model from `path` in `load_format`."""
        read = {"model_path": path, "load_format": load_format, "revision": None}
        model = {
            **self.fields["model"],
            **read,
            "checkpoint_engine_wait_weights_before_ready": False,
        }
        return replace(self, fields={**self.fields, "model": model})


@dataclass(frozen=True, slots=True)
class Update:
    """Source of new weights that a running engine receives in a weight update."""

    version: str | None = None
    """The user's version of the new weights; None if none was given."""
    path: str | None = None
    """The path from which SGLang reads the new weights; None if another process sends them."""
    load_format: str | None = None
    """The load format of the weight files at `path`; None means the format used at startup."""


def kv_identity(
    resolved: Resolved, weights: str, layouts: Mapping[str, PageLayout], share: Share
) -> str:
    """Return the part of page keys that identifies the engine; `layouts` are page layouts by pool.

    Raises `ConfigError` for a setting without a canonical byte form.
    """
    model = resolved.model_config
    description = KvDescription.of(model.hf_config, model.dtype, layouts)
    return kv_name(weights, description, settings_of(resolved), share, log)


def settings_of(resolved: Resolved) -> KeyedEngineSettings:
    """Return the engine's settings, including its environment variables."""
    found = [
        *(each for namespace in resolved.fields for each in _settings(resolved, namespace)),
        *(Setting(name, name, value, MISSING) for name, value in resolved.environment.items()),
    ]
    return _engine_settings(resolved, found)


def adapter_options(resolved: Resolved) -> str:
    """Return a digest of the SGLang options that may change how a LoRA adapter is applied."""
    return _engine_settings(resolved, [*_settings(resolved, "lora")]).digest()


def _engine_settings(resolved: Resolved, settings: list[Setting]) -> KeyedEngineSettings:
    return KeyedEngineSettings(
        "SGLang", resolved.engine_version, RELEASES, settings, PACKAGE, EXCLUSIONS, RESOLVED
    )


def _settings(resolved: Resolved, namespace: str) -> Iterator[Setting]:
    """Yield the settings of one section of SGLang's configuration.

    The value of a setting that names a file is replaced by True if a file is given, else by False.
    """
    files = FILES.get(namespace, "").split()
    for name, value in resolved.fields[namespace].items():
        default = False if name in files else resolved.declared.get(name, MISSING)
        counted = value is not None if name in files else value
        yield Setting(name, f"{namespace}.{name}", counted, default)


def weights_of(resolved: Resolved, version: str | None, digests: FileDigests, where: str) -> str:
    """Return the identity of the weights, including a draft model and separate weight files.

    The user's `version`, if given, identifies all of them, and no file is read. Raises `ConfigError`
    with a remedy if the weights cannot be identified; `where` names the setting for a version.
    """
    if version is not None:
        return f"version {version}"
    field = resolved.field
    if field("model", "weight_cache_mode") != NO_CACHE_OF_WEIGHTS:
        raise ConfigError(
            "weight_cache_mode takes weights from another process, so their content is unknown;"
            f" {remedy(where)}"
        )
    if field("model", "checkpoint_engine_wait_weights_before_ready"):
        raise ConfigError(
            "checkpoint_engine_wait_weights_before_ready takes weights from another process, so their"
            " content is unknown;"
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
    """Return a digest of the content of the file or folder at the path `value`.

    `name` is the setting that has this path, as named in error messages.
    """
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
    """Return the identity of one model's weights; `named` is (path, revision, load format)."""
    path, revision, load_format = named
    if load_format == DUMMY:
        # Add the TP size to the identity of dummy weights, because each rank fills its shard from the
        # same seed.
        return f"dummy on {resolved.field('parallel', 'tp_size')}"
    loaded = LoadedWeights(str(path), revision, str(load_format), load_format in FROM_FILES)
    return loaded.identity(digests, where)
