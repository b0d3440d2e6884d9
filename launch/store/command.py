"""`lockstep store`: what is in a store, whether it is sound, and tidying it, while engines use it."""

from typing import Annotated

import typer

from ...errors import ConfigError
from ...storage_backends.uri import RANK
from ..cli.amounts import shown_store


def _exit(status: int, **_: object) -> None:
    raise typer.Exit(status)


store = typer.Typer(
    name="store",
    result_callback=_exit,
    help="Look into a store (L3), verify it and tidy it, while engines use it.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Uri = Annotated[
    str,
    typer.Argument(
        help="Store, for example file:///var/kv; with {rank} in it, give --rank too.", metavar="URI"
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        min=0, help="The rank whose store is meant by {rank} in a URI.", show_default="none"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Jobs = Annotated[
    int, typer.Option(help="Batches at a time; each takes 16 MiB of memory, or one larger object.")
]
JOBS_DEFAULT = 4
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]


@store.command("ls")
def ls(
    uri: Uri,
    *,
    objects: Annotated[
        bool, typer.Option("--objects", help="One line for each object; with --json, one record.")
    ] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> int:
    """Show what is in a store, by model and shard.

    Models come with their weights version; below them namespaces, pools and shards.
    """
    from .runs import run_ls

    return run_ls(_of_rank(uri, rank), objects=objects, as_json=as_json)


@store.command("stat")
def stat(uri: Uri, *, rank: Rank = None, as_json: Json = False) -> int:
    """Show how much is in a store, and what it can do."""
    from .runs import run_stat

    return run_stat(_of_rank(uri, rank), as_json=as_json)


@store.command("verify")
def verify(
    uri: Uri,
    *,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Only this namespace: its digest, or the beginning of it.",
            show_default="all",
            metavar="DIGEST",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Only so many objects, drawn at random.", show_default="all"),
    ] = None,
    jobs: Jobs = JOBS_DEFAULT,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Let the store take what is corrupt out of the way."),
    ] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> int:
    """Read every object whole and check it.

    Exits with 1 if something is corrupt, with 3 if something could not be read. In file://, 3fs://
    and s3:// nothing is changed without --fix; other stores take what is corrupt out of the way when
    anybody reads it.
    """
    from .verify import run_verify

    return run_verify(
        _of_rank(uri, rank),
        namespace=namespace,
        sample=sample,
        jobs=jobs,
        fix=fix,
        as_json=as_json,
    )


@store.command("gc")
def gc(
    uri: Uri,
    *,
    older_than: Annotated[
        str | None,
        typer.Option(
            help="Remove pages not written or used for so long: 90s, 15m, 12h, 7d, 2w.",
            show_default="none",
            metavar="AGE",
        ),
    ] = None,
    to_bytes: Annotated[
        str | None,
        typer.Option(
            help="Remove the least recently used pages until the rest is no larger: 100GiB.",
            show_default="none",
            metavar="SIZE",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Only pages of this model, with any weights.", show_default="all"),
    ] = None,
    rank: Rank = None,
    dry_run: DryRun = False,
) -> int:
    """Remove the pages that nobody has used for long.

    An engine that wants one of them has a miss. Manifests and marks stay.
    """
    from .removal import run_gc

    return run_gc(
        _of_rank(uri, rank),
        older_than=older_than,
        to_bytes=to_bytes,
        model=model,
        dry_run=dry_run,
    )


@store.command("rm")
def rm(
    uri: Uri,
    *,
    model: Annotated[
        str | None, typer.Option(help="Remove this model.", show_default="none")
    ] = None,
    weights_version: Annotated[
        str | None,
        typer.Option(help="Only the model with these weights.", show_default="all weights"),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Remove this namespace: its digest, or the beginning of it.",
            show_default="none",
            metavar="DIGEST",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove every object of Lockstep in the store.")
    ] = False,
    rank: Rank = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Remove a model, a namespace or everything.

    It asks before, and touches nothing that is not an object of Lockstep. A manifest goes last.
    """
    from .removal import run_rm

    return run_rm(
        _of_rank(uri, rank),
        model=model,
        weights_version=weights_version,
        namespace=namespace,
        everything_there=everything,
        dry_run=dry_run,
        yes=yes,
    )


def _of_rank(uri: str, rank: int | None) -> str:
    """Return the URI of one rank's store, where each rank has one of its own.

    Raises `ConfigError` where it is not said whose, or where it is and the store is one for all.
    """
    if RANK in uri and rank is not None:
        return uri.replace(RANK, str(rank))
    if RANK in uri:
        raise ConfigError(
            f"store {shown_store(uri)!r} is another one for each rank, and this command works on one; "
            f"add --rank N, which stands in the place of {RANK}"
        )
    if rank is not None:
        raise ConfigError(
            f"--rank is {rank}, and store {shown_store(uri)!r} has no {RANK} in it: it is one for all"
        )
    return uri
