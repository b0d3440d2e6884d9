"""Why something that one group says to another is refused: a kind to be counted, and a sentence."""

from enum import StrEnum

from ...errors import MessageError


class Refusal(StrEnum):
    """The kinds of refusal. Values are told between groups, and never change their meaning."""

    VERSION = "version"
    """It is of a version of the protocol that this process does not speak."""
    SECRET = "secret"  # noqa: S105 - the name of a refusal.
    """The two sides do not know the same secret."""
    STRANGER = "stranger"
    """It is of another start of the group, or of a rank that the group does not have."""
    MALFORMED = "malformed"
    """Its bytes are none that this protocol writes."""
    CHECKSUM = "checksum"
    """Its bytes are not those that were written."""
    TOO_LARGE = "too_large"
    """It has more bytes than it may have."""
    FULL = "full"
    """As many wait as may wait."""
    FORGOTTEN = "forgotten"
    """It is so far behind what its sender has sent since that nobody knows whether it came before."""
    LATE = "late"
    """It was not taken within its time."""
    CLOSED = "closed"
    """Whoever was to send it was closed."""
    UNKNOWN_KIND = "unknown_kind"
    """It is of a kind that this version does not know."""
    UNKNOWN_FIELD = "unknown_field"
    """It has a field that this version does not know."""
    MISSING_FIELD = "missing_field"
    """It lacks a field."""
    WRONG_TYPE = "wrong_type"
    """A field holds what is not of its type."""
    OUT_OF_BOUNDS = "out_of_bounds"
    """A field holds a value that it cannot have."""
    NAMESPACE = "namespace"
    """It is of another model, or of other layouts of its pages as names of objects have them."""
    WEIGHTS = "weights"
    """It is of another version of the weights."""
    LAYOUT = "layout"
    """Its pages are laid out differently."""


class Refused(MessageError):
    """Something is refused; the sentence says what was found, and what was expected."""

    def __init__(self, refusal: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.refusal = refusal
        """The kind, to be counted."""
