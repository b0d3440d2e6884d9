"""Arguments that the `lockstep store` commands share."""

from typing import Annotated

from cyclopts import Parameter

from ...errors import ConfigError
from ...storage_backends.uri import RANK
from ..cli.amounts import shown_store
from ..cli.options import AT_LEAST_0

Uri = Annotated[
    str,
    Parameter(help="Store, for example file:///var/kv; if it contains {rank}, give --rank, too."),
]
Rank = Annotated[
    int | None,
    AT_LEAST_0,
    Parameter(help="The rank that replaces {rank} in the URI.", show_default="none"),
]
Digest = Annotated[str | None, Parameter(metavar="DIGEST")]
DryRun = Annotated[bool, Parameter(help="Only show what would be removed.")]


def of_rank(uri: str, rank: int | None) -> str:
    """Return the store's URI; if each rank has its own store, the URI for `rank`.

    Raises `ConfigError` if the URI needs a rank and none is given, or if a rank is given and not
    needed.
    """
    if RANK in uri and rank is not None:
        return uri.replace(RANK, str(rank))
    if RANK in uri:
        raise ConfigError(
            f"store {shown_store(uri)!r} has {RANK}, so each rank has its own; add --rank N to choose"
            " one"
        )
    if rank is not None:
        raise ConfigError(
            f"--rank is {rank}, but store {shown_store(uri)!r} has no {RANK}; leave out --rank"
        )
    return uri
