"""Atomic writing of report files, and bounded reading of files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError


def check_that_writable(path: str | Path, what: str = "report") -> None:
    """Raise `ConfigError` if no file can be written at `path`; `what` names the file in the message."""
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"cannot write the {what} {path}: it is a directory")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write the {what} {path}: there is no directory {target.parent}")
    if _is_written_through(target):
        return
    trial = _beside(target)
    try:
        trial.touch()
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {path}: {error.strerror or error}") from error
    finally:
        trial.unlink(missing_ok=True)


def write_report(path: str | Path | None, report: Mapping[str, object]) -> None:
    """Write the report as JSON with `write_text`, unless `path` is None."""
    if path is not None:
        write_text(path, f"{json.dumps(report, indent=2)}\n")


def write_text(path: str | Path, text: str, what: str = "report") -> None:
    """Write a file whole or not at all, through a temporary file and a rename.

    A symbolic link, pipe or device is not replaced; the text is written to it directly.
    """
    target = Path(path)
    temporary = _beside(target)
    try:
        if _is_written_through(target):
            target.write_text(text, encoding="utf-8")
            return
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_written_through(target: Path) -> bool:
    return target.is_symlink() or (target.exists() and not target.is_file())


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """Return a file's bytes; raise `ConfigError` if it cannot be read or exceeds `bytes_max`."""
    try:
        with path.open("rb") as file:
            found = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(found) > bytes_max:
        raise ConfigError(f"{path} is larger than {bytes_max >> 20} MiB; name another file")
    return found
