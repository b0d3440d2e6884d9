"""The version of this package, which every rank of a group must have."""

from typing import Final

VERSION: Final = "0.1.0"
