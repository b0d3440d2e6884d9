"""Values of options, refused under the name that an option has on the command line."""

from collections.abc import Collection
from math import inf
from pathlib import Path

from ...errors import ConfigError
from ...storage_backends.base import Capabilities
from ...storage_backends.registry import make_backend
from ...storage_backends.uri import RANK, without_secrets


def option(name: str) -> str:
    """Return the command's option for a setting."""
    return f"--{name.replace('_', '-')}"


def check_number(name: str, value: float, least: int, most: float = inf) -> None:
    """Raise `ConfigError` unless the setting `name` is from `least` to `most`."""
    # Written so that it refuses what is not a number, too.
    if not least <= value <= most:
        wanted = f"{least} or more" if most == inf else f"from {least} to {most}"
        raise ConfigError(f"{option(name)} is {value}, must be {wanted}")


def check_choice(name: str, value: str, known: Collection[str]) -> None:
    """Raise `ConfigError` unless the setting `name` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{option(name)} is {value!r}, must be one of: {', '.join(known)}")


def check_not_a_path(uri: str) -> None:
    """Raise `ConfigError` if --store is a bare path, and say what to write for it."""
    if not uri:
        raise ConfigError("--store is empty; give a URI, for example file:///var/kv")
    if ":" not in uri:
        raise ConfigError(
            f"--store is {without_secrets(uri)!r}, which is not a URI; for a directory write"
            f" {Path(uri).absolute().as_uri()}"
        )


def check_store(uri: str) -> Capabilities:
    """Return what the store that --store names can do; raise `ConfigError` if it names none."""
    check_not_a_path(uri)
    try:
        # Each rank opens its own; what is wrong with one is wrong with all.
        capabilities = make_backend(uri.replace(RANK, "0")).capabilities
    except ConfigError as error:
        raise ConfigError(f"--store: {error}") from error
    if not capabilities.writes:
        raise ConfigError(
            f"--store is {without_secrets(uri)!r}, which takes no pages: it is what another group"
            " serves"
        )
    return capabilities
