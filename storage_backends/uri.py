"""The URI that names a store: parsed once, and every doubtful part refused by name.

    scheme://host/path?option=value&option=value
    wrapper+wrapper+scheme://...

Wrappers (the outermost first) stand before the scheme. What host, path and options mean is the
scheme's own business; it reads options through `StoreUri`, so that a misspelt one cannot pass.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import ConfigError

_SCHEMES = re.compile(r"[a-z0-9][a-z0-9.-]*(\+[a-z0-9][a-z0-9.-]*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUri:
    """A store's URI in its parts. `path` is percent-decoded; `text` is what the user wrote."""

    text: str
    wrappers: tuple[str, ...]
    scheme: str
    host: str
    path: str
    options: Mapping[str, str]

    def only_options(self, known: Sequence[str]) -> None:
        """Raise `ConfigError` if there is an option that is not in `known`."""
        for name in self.options:
            if name not in known:
                offer = ", ".join(sorted(known)) or "none"
                raise ConfigError(
                    f"store {self.text!r}: unknown option {name!r}; {self.scheme}:// knows: {offer}"
                )

    def choice(self, name: str, values: Sequence[str], default: str) -> str:
        """Return the option's value, which must be one of `values`."""
        value = self.options.get(name, default)
        if value not in values:
            raise ConfigError(
                f"store {self.text!r}: {name} is {value!r}, must be one of: {', '.join(values)}"
            )
        return value

    def number(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return the option's value as a whole number from `low` to `high`."""
        value = self.options.get(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            raise ConfigError(f"store {self.text!r}: {name} is {value!r}, must be a whole number")
        if not low <= int(value) <= high:
            raise ConfigError(
                f"store {self.text!r}: {name} is {value}, must be from {low} to {high}"
            )
        return int(value)


def parse_uri(text: str) -> StoreUri:
    """Return the parts of a store's URI, or raise `ConfigError` saying what is wrong with it."""
    head, separator, _ = text.partition("://")
    if not separator:
        raise ConfigError(
            f"store {text!r} is not a URI; write it as scheme://..., for example file:///var/kv"
        )
    if _SCHEMES.fullmatch(head) is None:
        raise ConfigError(f"store {text!r}: {head!r} is not a scheme")
    if any(ord(character) <= 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"store {text!r} has a space or control character; percent-encode it")
    *wrappers, scheme = head.split("+")
    try:
        parts = urlsplit(f"x{text[len(head) :]}")
    except ValueError as error:
        raise ConfigError(f"store {text!r}: {error}") from error
    if parts.fragment or text.endswith("#"):
        raise ConfigError(f"store {text!r} has a fragment; percent-encode '#' as %23")
    path = unquote(parts.path)
    if "\0" in path:
        raise ConfigError(f"store {text!r}: the path has a NUL character")
    return StoreUri(
        text=text,
        wrappers=tuple(wrappers),
        scheme=scheme,
        host=parts.netloc,
        path=path,
        options=_options(text, parts.query),
    )


def _options(text: str, query: str) -> Mapping[str, str]:
    options: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"store {text!r}: options must be written name=value&...") from error
    for name, value in pairs:
        if name in options:
            raise ConfigError(f"store {text!r}: option {name!r} is given twice")
        options[name] = value
    return MappingProxyType(options)
