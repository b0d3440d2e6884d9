"""Typed access to the fields of a Hugging Face `config.json`; errors name the wrong field."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from ...errors import ConfigError
from ..cli.report_files import read_bounded

CONFIG = "config.json"
NUMBER_MAX = 1 << 30
_BYTES_MAX = 16 << 20


class ConfigFields:
    """The fields of one model's configuration, and the name of the file that has them."""

    def __init__(self, fields: Mapping[str, object], where: str) -> None:
        self._fields = fields
        self.where = where

    @classmethod
    def read(cls, path: Path) -> "ConfigFields":
        """Read a model's configuration from `path`, a `config.json` or a directory that has one."""
        file = path / CONFIG if path.is_dir() else path
        text = read_bounded(file, _BYTES_MAX)
        try:
            read = msgspec.json.decode(text, type=dict[str, object])
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is no JSON object, as a {CONFIG} is: {error}") from error
        return cls(read, str(file))

    def text(self) -> "ConfigFields":
        """Return the language model's fields, which a multimodal model has in `text_config`."""
        inner = self._fields.get("text_config")
        if not isinstance(inner, dict):
            return self
        return ConfigFields(cast("dict[str, object]", inner), f"{self.where}, text_config")

    def with_defaults(self, defaults: Mapping[str, object]) -> "ConfigFields":
        """Return these fields with `defaults` for missing and null fields."""
        given = {name: value for name, value in self._fields.items() if value is not None}
        return ConfigFields({**defaults, **given}, self.where)

    def has(self, name: str) -> bool:
        """Return whether a field is present and not null."""
        return self._fields.get(name) is not None

    def flag(self, name: str) -> bool:
        """Return whether a field is true; false if it is missing."""
        return self._fields.get(name) is True

    def word(self, name: str) -> str:
        """Return a text field; empty if it is missing."""
        value = self._fields.get(name)
        return value if isinstance(value, str) else ""

    def words(self, name: str) -> list[str]:
        """Return a field with a list of texts; empty if it is missing."""
        return self._converted(name, list[str]) if self.has(name) else []

    def number(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = NUMBER_MAX
    ) -> int:
        """Return an integer field, or `default` if the field is missing.

        Raises `ConfigError` if the field is missing and there is no default, or if the integer is less
        than `least` or more than `most`.
        """
        if self.has(name):
            number: int = self._converted(name, Annotated[int, Meta(ge=least, le=most)])
            return number
        if default is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default

    def _converted(self, name: str, kind: Any) -> Any:
        value = self._fields[name]
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.where}: {name} is {value!r:.40}: {error}") from error
