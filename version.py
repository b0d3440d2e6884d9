"""The version of this package, which must be the same on every rank of a group."""

from typing import Final

VERSION: Final = "0.1.0"
