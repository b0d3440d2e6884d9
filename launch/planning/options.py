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
