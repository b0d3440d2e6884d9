"""What is known of weights that come to a running engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Update:
    """What an update says of its weights."""

    version: str | None = None
    """The user's name for them."""
    path: str | None = None
    """Where they are read, if they are."""
    load_format: str | None = None
    """How they are read there."""
