"""The options that `lockstep plan` and `lockstep size` share."""

from typing import Annotated

import typer

from .published import PUBLISHED

ModelChoice = Annotated[
    str,
    typer.Option(
        help=f"A model's config.json, its directory, or one known by name: {', '.join(PUBLISHED)}.",
        metavar="CONFIG",
    ),
]
KVType = Annotated[str, typer.Option("--dtype", help="Element type of the KV.")]
RanksOfModel = Annotated[int, typer.Option("--tp", help="Ranks that divide the model (TP size).")]
Policies = Annotated[
    str,
    typer.Option(
        help="Which page leaves first: lru, lfu, slru, priority; or fifo, to compare.",
        metavar="A,B,..",
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(
        help="Look for the least host memory that hits so much of all prompt tokens: 0.3 or 30%.",
        show_default="none",
        metavar="SHARE",
    ),
]
