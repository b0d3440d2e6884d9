"""From the text that names a page index to the index."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...errors import ConfigError
from ..uri import without_secrets
from .contract import PageIndex


def make_index(text: str, name: str, *, home: Path | None = None) -> PageIndex:
    """Return the index that `text` names, not open yet.

    `sqlite:///absolute/path` is for processes of one host; `redis://host:port/db`, `rediss://` and
    `unix:///path/of/socket?db=0` are for any number of nodes, and there `name` keeps several
    indexes in one database apart. The directory of a SQLite file must be there, but for one within
    `home`, the store's own directory. Raises `ConfigError` for anything else.
    """
    scheme, separator, _ = text.partition("://")
    if scheme == "sqlite" and separator:
        from .sqlite import SqlitePageIndex

        return SqlitePageIndex(_path_of(text), home=home)
    if scheme in ("redis", "rediss", "unix") and separator:
        from .redis import RedisPageIndex

        return RedisPageIndex(text, name)
    raise ConfigError(
        f"index {without_secrets(text)!r} is not known; write sqlite:///absolute/path or "
        "redis://host:port/db"
    )


def _path_of(text: str) -> str:
    """Return the path in `sqlite:///absolute/path`."""
    try:
        parts = urlsplit(text)
        path = "" if parts.netloc or parts.query else unquote(parts.path, errors="strict")
    except ValueError:
        path = ""
    if not path.strip("/"):
        raise ConfigError(f"index {without_secrets(text)!r}: write sqlite:///absolute/path")
    if "\0" in path:
        raise ConfigError(f"index {without_secrets(text)!r}: the path has a NUL character")
    return path
