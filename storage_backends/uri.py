"""The URI that names a store: parsed once, and every doubtful part refused by name.

    scheme://host/path?option=value&option=value
    wrapper+wrapper+scheme://...

Wrappers (the outermost first) stand before the scheme. What host, path and options mean is the
scheme's own business, except that an option `<wrapper>.<name>` belongs to that wrapper. Each reads
its own as `Settings` through `StoreUri.read`, which refuses what they do not have, so that a misspelt
one cannot pass.

A URI may have credentials in it, as that of an index's database may. Whatever is printed, logged,
raised or reported of one goes through `without_secrets`; what others say of it, as the client of a
store does, through `without_secrets_of`.
"""

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, unquote_plus, urlsplit

from ..coordinator.settings import SettingsT, read_settings
from ..errors import ConfigError, LockstepError

_SCHEMES = re.compile(r"[a-z0-9][a-z0-9.-]*(\+[a-z0-9][a-z0-9.-]*)*")
_HIDDEN: Final = "***"
_USER = re.compile(r"://(?:[^/@:?&=#]*:[^&]*|[^/?&#]*)@")
"""Who connects, and the password, which may have characters in it that it must not."""
_USER_OF_NO_URI = re.compile(r"^[^?]*:.*@")
_SECRET = re.compile(r"secret|token|pass|pwd|pw$|cred|auth|key|sig(nature)?$", re.IGNORECASE)
_SHOWN_PLAIN: Final = ":/?*@,=[]"
RANK: Final = "{rank}"
"""Stands for the rank in a URI, where each rank has a store of its own."""
_NESTED_MAX: Final = 4
"""URIs in options of URIs; what is deeper is not shown at all."""
_SECRET_CHARACTERS_MIN: Final = 3
"""What is shorter stands in many words, and says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUri:
    """A store's URI in its parts. `path` is percent-decoded.

    `text` is what the user wrote, for messages: `without_secrets`. It alone is printed.
    """

    text: str
    wrappers: tuple[str, ...] = field(repr=False)
    scheme: str = field(repr=False)
    host: str = field(repr=False)
    path: str = field(repr=False)
    options: Mapping[str, str] = field(repr=False)

    def read(self, kind: type[SettingsT], wrapper: str = "", **parts: object) -> SettingsT:
        """Return the options as settings, beside the `parts` that the rest of the URI says.

        With `wrapper` those of a wrapper: of `breaker.calls` the setting is `calls`. Raises
        `ConfigError` for an option that has no field, or another kind of value; options of the wrappers
        that the URI names are theirs to read.
        """
        given: dict[str, object] = {}
        for name, value in self.options.items():
            owner, dot, its = name.partition(".")
            if not (dot and owner in self.wrappers):
                if (dot or name in parts) and not wrapper:
                    hint = f"; it needs {owner}+ before the scheme" if dot else ""
                    raise ConfigError(f"store {self.text!r}: there is no option {name!r}{hint}")
                its, owner = name, ""
            if owner == wrapper:
                given[its] = value
        where = f"store {self.text!r}{wrapper and f': {wrapper}'}"
        return read_settings(kind, given | parts, where, strict=False)

    def directory(self, example: str) -> Path:
        """Return the absolute path that a URI without a host names; `example` is such a URI."""
        if self.host:
            raise ConfigError(
                f"store {self.text!r} names a host; an absolute path needs three slashes: {example}"
            )
        if not self.path.strip("/"):
            raise ConfigError(f"store {self.text!r} has no path; write {example}")
        return Path(os.path.normpath(self.path))

    def refuse_half_characters(self) -> None:
        """Raise `ConfigError` for what no client in another language can be told."""
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"store {self.text!r} has half a character (a lone surrogate); write it in UTF-8"
            ) from None


def without_secrets(text: str) -> str:
    """Return a store's URI as it may be shown to anybody, also one that is malformed.

    Users and passwords before '@', and the values of options whose names speak of a secret, are `***`,
    in the URIs that options have as their values too. Everything else is as it was written; rather too
    much is hidden than too little.
    """
    return _shown(text, _NESTED_MAX)


def _shown(text: str, depth: int) -> str:
    if "://" in text:
        text = _USER.sub(f"://{_HIDDEN}@", text)
    else:
        text = _USER_OF_NO_URI.sub(f"{_HIDDEN}@", text)
    head, mark, query = text.partition("?")
    return head + mark + "&".join(_shown_option(each, depth) for each in query.split("&"))


def _shown_option(option: str, depth: int) -> str:
    name, sign, value = option.partition("=")
    if sign and _SECRET.search(unquote_plus(name)):
        return f"{name}={_HIDDEN}"
    plain = unquote_plus(value)
    if not set(plain).intersection("@=%"):
        return option
    shown = _shown(plain, depth - 1) if depth else _HIDDEN
    if shown == plain:
        return option
    return f"{name}={quote(shown, safe=_SHOWN_PLAIN, errors='backslashreplace')}"


def without_secrets_of(uri: str, text: str) -> str:
    """Return what somebody says of a store without the secrets of its URI, also where it has parts."""
    for secret in sorted(_secrets(uri, _NESTED_MAX), key=len, reverse=True):
        if len(secret) >= _SECRET_CHARACTERS_MIN:
            text = text.replace(secret, _HIDDEN)
    return text


@contextmanager
def telling_no_secrets(uri: str) -> Generator[None]:
    """Let no error leave the block that repeats a secret of a store's URI, itself or in its cause."""
    try:
        yield
    except Exception as error:
        said = str(error)
        told = without_secrets_of(uri, said)
        if told == said:
            raise
        if isinstance(error, LockstepError):
            raise type(error)(told) from None
        raise ConfigError(f"{type(error).__name__}: {told}") from None


def _secrets(text: str, depth: int) -> set[str]:
    """Return what `_shown` hides, as it is written and as it is meant, in whole and in parts."""
    found: list[str] = []
    for user in (_USER if "://" in text else _USER_OF_NO_URI).findall(text):
        name = user.removeprefix("://").removesuffix("@")
        found += [name, *re.split("[:/@]", name)]
    for option in text.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if _SECRET.search(unquote_plus(name)):
            found.append(value)
        elif depth and set(plain := unquote_plus(value)).intersection("@=%"):
            found += _secrets(plain, depth - 1)
    return {*found, *map(unquote_plus, found)}


def parse_uri(text: str) -> StoreUri:
    """Return the parts of a store's URI, or raise `ConfigError` saying what is wrong with it."""
    shown = without_secrets(text)
    head, separator, _ = text.partition("://")
    if not separator:
        raise ConfigError(
            f"store {shown!r} is not a URI; write it as scheme://..., for example file:///var/kv"
        )
    if _SCHEMES.fullmatch(head) is None:
        raise ConfigError(
            f"store {shown!r}: {without_secrets(head)!r} is not a scheme; schemes are in lower case, "
            "and wrappers stand before them with a plus sign: file:///var/kv, breaker+file:///var/kv"
        )
    if any(ord(character) <= 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"store {shown!r} has a space or control character; percent-encode it")
    strange = re.search(r"\{[^}]*\}?|\}", text.replace(RANK, ""))
    if strange is not None:
        raise ConfigError(
            f"store {shown!r} has {without_secrets(strange[0])!r} in it; known: {RANK}, which stands"
            " for the rank; percent-encode a brace that is meant"
        )
    *wrappers, scheme = head.split("+")
    for name in wrappers:
        if wrappers.count(name) > 1:
            raise ConfigError(
                f"store {shown!r}: wrapper {name!r} is named twice, and options could not tell the "
                "two apart"
            )
    try:
        parts = urlsplit(f"x{text[len(head) :]}")
    except ValueError as error:
        raise ConfigError(f"store {shown!r}: {without_secrets_of(text, str(error))}") from None
    if parts.fragment or text.endswith("#"):
        raise ConfigError(f"store {shown!r} has a fragment; percent-encode '#' as %23")
    path = unquote(parts.path)
    if "\0" in path:
        raise ConfigError(f"store {shown!r}: the path has a NUL character")
    return StoreUri(
        text=shown,
        wrappers=tuple(wrappers),
        scheme=scheme,
        host=parts.netloc,
        path=path,
        options=_options(shown, parts.query),
    )


def _options(shown: str, query: str) -> Mapping[str, str]:
    options: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"store {shown!r}: options must be written name=value&...") from error
    for name, value in pairs:
        if name in options:
            raise ConfigError(f"store {shown!r}: option {name!r} is given twice")
        options[name] = value
    return MappingProxyType(options)
