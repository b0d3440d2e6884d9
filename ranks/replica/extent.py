"""How much a prefetch brings of the tokens that it is given."""

from enum import StrEnum


class Extent(StrEnum):
    """How much of a prompt a prefetch brings to host memory."""

    KV = "kv"
    """The whole pages of full attention alone, of a prompt that another group still computes: what a
    match needs beside them is brought once, at its end."""
    PAGES = "pages"
    """The longest prefix of whole pages that a match can use."""
    ALL = "all"
    """Everything, with the tail: the request can go on where another group has left it."""
