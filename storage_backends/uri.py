"""Parses the URI of a store, and rejects every ambiguous part with an error that names it.

    scheme://host/path?option=value&option=value
    wrapper+wrapper+scheme://...

Wrappers, outermost first, precede the scheme. The scheme defines the meaning of host, path and options;
an option `<wrapper>.<name>` belongs to that wrapper. Schemes and wrappers read their options as
`Settings` through `StoreUri.read`, which rejects unknown names, so a misspelt option is an error.

A URI may contain credentials. Code that prints, logs, raises or reports a URI must pass it through
`without_secrets`, and other text that may contain it, such as a client's error, through
`without_secrets_of`.
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

from ..coordinator.validated_settings import SettingsT, read_settings
from ..errors import ConfigError, LockstepError

_SCHEMES = re.compile(r"[a-z0-9][a-z0-9.-]*(\+[a-z0-9][a-z0-9.-]*)*")
_HIDDEN: Final = "***"
_USER = re.compile(r"://(?:[^/@:?&=#]*:[^&]*|[^/?&#]*)@")
"""Pattern of the user and password before '@' in a URI. The password may contain characters that should
be percent-encoded."""
_USER_OF_NO_URI = re.compile(r"^[^?]*:.*@")
_SECRET = re.compile(r"secret|token|pass|pwd|pw$|cred|auth|key|sig(nature)?$", re.IGNORECASE)
_SHOWN_PLAIN: Final = ":/?*@,=[]"
RANK: Final = "{rank}"
"""The text in a URI that is replaced by the rank's number, for stores that are separate for each rank.
"""
_NESTED_MAX: Final = 4
"""Maximum depth of nested URIs (URIs in option values) whose secrets are masked one by one. A URI
nested more deeply is masked as a whole."""
_SECRET_CHARACTERS_MIN: Final = 3
"""Minimum number of characters of a secret to mask in error texts. Shorter secrets reveal little and
would match many ordinary words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUri:
    """The components of a store's URI. `path` is percent-decoded.

    `text` is the URI without secrets, for messages. Print only `text`.
    """

    text: str
    wrappers: tuple[str, ...] = field(repr=False)
    scheme: str = field(repr=False)
    host: str = field(repr=False)
    path: str = field(repr=False)
    options: Mapping[str, str] = field(repr=False)

    def read(self, kind: type[SettingsT], wrapper: str = "", **parts: object) -> SettingsT:
        """Return the URI's options and `parts` as settings of the class `kind`.

        `parts` are settings from other components of the URI. If `wrapper` is given, only the options
        of that wrapper are used: `breaker.calls` becomes the setting `calls`. The options of other
        wrappers in the URI are ignored. Raises `ConfigError` for an unknown option or a value of the
        wrong type.
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
        """Return the absolute path in a URI without a host.

        Raises `ConfigError` for any other URI. The error shows `example`, a correct URI.
        """
        if self.host:
            raise ConfigError(
                f"store {self.text!r} names a host; an absolute path needs three slashes: {example}"
            )
        if not self.path.strip("/"):
            raise ConfigError(f"store {self.text!r} has no path; write {example}")
        return Path(os.path.normpath(self.path))

    def refuse_half_characters(self) -> None:
        """Raise `ConfigError` for a URI with a lone surrogate: native clients cannot represent it."""
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"store {self.text!r} has half a character (a lone surrogate); write it in UTF-8"
            ) from None


def without_secrets(text: str) -> str:
    """Return a store's URI without its secrets, also if it is malformed.

    Users and passwords before '@', and the values of options whose names suggest a secret, become
    `***`, also in URIs that are values of options. Text that may be a secret is masked too.
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
    """Return `text` with the secrets of `uri`, and the components of the secrets, replaced by `***`."""
    for secret in sorted(_secrets(uri, _NESTED_MAX), key=len, reverse=True):
        if len(secret) >= _SECRET_CHARACTERS_MIN:
            text = text.replace(secret, _HIDDEN)
    return text


@contextmanager
def hiding_secrets(uri: str) -> Generator[None]:
    """Mask the secrets of a store's URI in errors raised within the block, and in their causes."""
    try:
        yield
    except Exception as error:
        message = str(error)
        masked = without_secrets_of(uri, message)
        if masked == message:
            raise
        if isinstance(error, LockstepError):
            raise type(error)(masked) from None
        raise ConfigError(f"{type(error).__name__}: {masked}") from None


def _secrets(text: str, depth: int) -> set[str]:
    """Return the secrets of a URI and their components, each as written and percent-decoded."""
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
    """Return the components of a store's URI. Raises `ConfigError` that states the mistake."""
    shown = without_secrets(text)
    head, separator, _ = text.partition("://")
    if not separator:
        raise ConfigError(
            f"store {shown!r} is not a URI; write it as scheme://..., for example file:///var/kv"
        )
    if _SCHEMES.fullmatch(head) is None:
        raise ConfigError(
            f"store {shown!r}: {without_secrets(head)!r} is not a scheme; schemes are in lower case, "
            "and wrappers precede them with a plus sign: file:///var/kv, breaker+file:///var/kv"
        )
    if any(ord(character) <= 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"store {shown!r} has a space or control character; percent-encode it")
    strange = re.search(r"\{[^}]*\}?|\}", text.replace(RANK, ""))
    if strange is not None:
        raise ConfigError(
            f"store {shown!r} has {without_secrets(strange[0])!r} in it; known: {RANK}, which is"
            " replaced by the rank; percent-encode a brace that is meant"
        )
    *wrappers, scheme = head.split("+")
    for name in wrappers:
        if wrappers.count(name) > 1:
            raise ConfigError(
                f"store {shown!r}: wrapper {name!r} is named twice; name each wrapper once, "
                "because its options are given by its name"
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
