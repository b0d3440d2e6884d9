"""`lockstep ctl`: control requests to a running group, sent over its private Unix socket.

Every rank applies a request in the same step. Each command prints the result as text or JSON.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from ..coordinator.validated_settings import TIMEOUT_S_MAX
from ..errors import ConfigError, UsageError
from ..ranks.group.control.client import ask
from ..ranks.protocol.config import PAGES_MAX, TTL_S_MIN
from .cli.amounts import count, printable, well_formed
from .cli.exits import EXIT_GROUP
from .cli.options import Json, check_store, command_line

EXIT_STATUSES: Final = (
    "Exit status: 0, done on every rank; 2, no group listens or the request is refused, and nothing was"
    " changed; 3, not done, with the reason in the output."
)

_BOUNDS: Final = {
    "device_pages": "device pages",
    "host_pages": "host pages",
    "ttl_s": "s after the last use",
}

ctl = command_line(
    "ctl",
    help="Send a request to a running group; every rank applies it in the same step.",
    help_epilogue=EXIT_STATUSES,
)

Socket = Annotated[
    Path,
    Parameter(
        help="The group's socket, as given to `lockstep replay --control` or an engine's `control`.",
    ),
]
Pages = Annotated[
    int | None,
    Parameter(
        help="Most full-attention pages in this tier.",
        show_default="no limit",
        validator=Number(gte=0, lte=PAGES_MAX),
    ),
]
_SECONDS: Final = Parameter(metavar="SECONDS", validator=Number(gte=TTL_S_MIN, lte=TIMEOUT_S_MAX))


@ctl.command(name="list")
def list_all(socket: Socket, /, *, as_json: Json = False) -> None:
    """Show each namespace's pages, the limits, the pins and the store."""
    answer = _request(socket, "list")
    _print_answer(answer, as_json, *list_lines(answer))


@ctl.command
def stats(socket: Socket, /, *, as_json: Json = False) -> None:
    """Show the counters of rank 0."""
    answer = _request(socket, "stats")
    _print_answer(answer, as_json, *stats_lines(answer))


@ctl.command
def pin(
    socket: Socket,
    name: Annotated[str, Parameter(help="A name for the pin, which `unpin` takes.")],
    /,
    *,
    tokens: Annotated[
        str,
        Parameter(
            help="Comma-separated token ids, or `-` to read them from stdin.",
            metavar="IDS",
            allow_leading_hyphen=True,
        ),
    ],
    namespace: Annotated[str, Parameter(help="The namespace of the prompt.")] = "",
    ttl: Annotated[float, _SECONDS, Parameter(help="Seconds until the pin expires.")] = 3600.0,
    as_json: Json = False,
) -> int:
    """Keep the cached part of a prompt for a given time."""
    ids = _ids(sys.stdin.read() if tokens == "-" else tokens)
    answer = _request(socket, "pin", name=name, tokens=ids, namespace=namespace, ttl_s=ttl)
    kept = answer["tokens"]
    message = f"pinned {kept:,} of {count(len(ids), 'token')} for {ttl:g} s"
    _print_answer(
        answer,
        as_json,
        message
        if kept
        else "nothing is pinned: no token is cached, or the limit of pins is reached",
    )
    return 0 if kept else EXIT_GROUP


@ctl.command
def unpin(
    socket: Socket,
    name: Annotated[str, Parameter(help="The pin's name.")],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Remove a pin."""
    answer = _request(socket, "unpin", name=name)
    _print_answer(
        answer, as_json, "unpinned" if answer["was_pinned"] else "no such pin; it may have expired"
    )


@ctl.command
def drop(
    socket: Socket,
    namespace: Annotated[
        str | None, Parameter(help="The namespace to drop.", show_default="none")
    ] = None,
    /,
    *,
    everything: Annotated[bool, Parameter("--all", help="Drop every namespace.")] = False,
    as_json: Json = False,
) -> None:
    """Evict the unlocked pages of a namespace.

    Evicts from device and host, and removes the namespace's pins. Storage keeps its objects.
    """
    if everything is (namespace is not None):
        raise ConfigError("name the namespace to drop, or give --all")
    answer = _request(socket, "drop", namespace=namespace)
    held = answer["held"]
    still = f"; {held:,} in use by requests: drop again when they have finished" if held else ""
    _print_answer(answer, as_json, f"evicted {count(answer['pages'], 'page')}{still}")


@ctl.command
def limit(
    socket: Socket,
    namespace: Annotated[str, Parameter(help="The namespace; * for all without a limit.")],
    /,
    *,
    device_pages: Pages = None,
    host_pages: Pages = None,
    ttl: Annotated[
        float | None,
        _SECONDS,
        Parameter(help="Evict pages this long after their last use.", show_default="none"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set the limits of a namespace; without options, remove them.

    Replaces the namespace's previous limits. Pages over the new limit are evicted in the next step.
    """
    answer = _request(
        socket,
        "limit",
        namespace=namespace,
        device_pages=device_pages,
        host_pages=host_pages,
        ttl_s=ttl,
    )
    unknown = (
        ""
        if answer["is_known"]
        else f"; namespace {printable(namespace)!r} has no cached pages yet"
    )
    bounds = (device_pages, host_pages, ttl)
    _print_answer(answer, as_json, f"{'removed' if bounds == (None,) * 3 else 'set'}{unknown}")


@ctl.command
def flush(socket: Socket, /, *, as_json: Json = False) -> None:
    """Write all unwritten pages to the store and wait.

    Includes pages that were in host memory before the store was attached.
    """
    answer = _request(socket, "flush")
    causes = ", ".join(f"{cause} {pages}" for cause, pages in answer["unwritten"].items())
    left = f"; unwritten pages: {causes}" if causes else ""
    _print_answer(answer, as_json, f"{count(answer['operations'], 'operation')} finished{left}")


@ctl.command
def attach(
    socket: Socket,
    store: Annotated[
        str,
        Parameter(
            help="The store, for example file:///var/kv, with {rank} if each rank has one. `-` reads it"
            " from stdin, because other users can see the arguments of a command.",
            allow_leading_hyphen=True,
        ),
    ],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Attach a store, once every rank has opened it."""
    uri = sys.stdin.read().strip() if store == "-" else store
    check_store(uri, only_read=True, name="STORE")
    _print_answer(_request(socket, "attach", store=uri), as_json, "attached")


@ctl.command
def detach(socket: Socket, /, *, as_json: Json = False) -> None:
    """Detach the store.

    Aborts the operations in flight for the store.
    """
    _print_answer(_request(socket, "detach"), as_json, "detached")


@ctl.command
def weights(
    socket: Socket,
    version: Annotated[str, Parameter(help="The version, which is part of every key.")],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Set the weights version; pages of other versions no longer match."""
    if not version:
        raise ConfigError("VERSION is empty; give the name of the new weights")
    _print_answer(
        _request(socket, "weights", version=version), as_json, f"weights {printable(version)!r}"
    )


@ctl.command(name="log-level")
def log_level(
    socket: Socket,
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(help="The lowest level that is logged."),
    ],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Set the log level of every process of the group."""
    _print_answer(_request(socket, "log-level", level=level), as_json, f"log level set to {level}")


class _Answer(dict[str, Any]):
    """An answer of a group as a JSON object; a missing field raises `ConfigError`."""

    def __missing__(self, name: str) -> object:
        raise ConfigError(
            f"the answer has no {name!r}: the group runs another version; use the `lockstep` of"
            " its version"
        )


def _request(socket: Path, what: str, **fields: Any) -> dict[str, Any]:
    try:
        answer = ask(socket, what, **fields)
    except UsageError as error:
        # If the group refuses a request, the command reports wrong input and exits with 2.
        raise ConfigError(str(error)) from error
    decoded: dict[str, Any] = json.loads(json.dumps(answer), object_hook=_Answer)
    return decoded


def _print_answer(answer: Mapping[str, Any], as_json: bool, *lines: str) -> None:
    print(json.dumps(well_formed(answer), indent=2) if as_json else "\n".join(lines))


def _ids(text: str) -> list[int]:
    try:
        return [int(each) for each in text.replace("[", "").replace("]", "").split(",")]
    except ValueError as error:
        raise ConfigError(f"--tokens must be comma-separated token ids: {error}") from error


def list_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the lines of `ctl list`; namespaces are sorted by their number of pages, most first."""
    most_first = sorted(answer["namespaces"].items(), key=lambda each: -sum(each[1].values()))
    lines = _columns(
        ("namespace", "device pages", "host pages"),
        *((_name(name), each["device_pages"], each["host_pages"]) for name, each in most_first),
    )
    for each in answer["limits"]:
        bounds = [
            f"{value:g} {words}"
            for name, words in _BOUNDS.items()
            if (value := each[name]) is not None
        ]
        lines.append(f"limit of {_name(each['namespace'])}: {', '.join(bounds) or 'none'}")
    for name, each in answer["pins"].items():
        lines.append(
            f"pin {_name(name)}: {count(each['tokens'], 'token')} of {_name(each['namespace'])}"
        )
    return [*lines, f"store: {answer['store']}"]


def stats_lines(stats: Mapping[str, Any]) -> list[str]:
    """Return the lines of `ctl stats` for one rank; the fields are those of `CacheStats`."""
    replica = stats["replica"]
    prompt_tokens = replica["asked_tokens"]
    hits = ", ".join(
        f"{tier} {tokens / prompt_tokens:.1%}"
        for tier, tokens in replica["hit_tokens"].items()
        if prompt_tokens
    )
    pools = _columns(
        ("pool", "tier", "pages", "cached", "held", "free"),
        *(
            (name, tier, use["pages"], use["cached"], use["held"], use["free"])
            for name, tiers in stats["pools"].items()
            for tier, use in tiers.items()
        ),
    )
    rows = {
        "ended by": stats["ended_by"],
        "in flight": _counts(stats["in_flight"]),
        "operations": _counts(
            {
                f"{kind} {outcome}": times
                for kind, outcomes in replica["operations"].items()
                for outcome, times in outcomes.items()
            }
        ),
        "tokens missed": _counts(replica["missed_tokens"]),
        "pages missed": _counts(replica["missed_pages"]),
        "pages corrupt": stats["pages_corrupt"] or "",
        "unwritten pages": _counts(stats["unwritten_pages"]),
        "pages lost before they were written": _counts(stats["left_unwritten_pages"]),
        "bytes moved": _counts(stats["bytes_moved"]),
        "store calls that timed out": stats["storage_late"]["calls"] or "",
    }
    steps = count(stats["steps"], "step")
    who = f"rank {stats['rank']} of {stats['world_size']}"
    return [
        f"{who}: {steps}, {stats['transport']}, store {stats['store']}",
        f"{count(prompt_tokens, 'prompt token')}: {hits or 'no hit'}",
        *pools,
        *(f"{what}: {value}" for what, value in rows.items() if value),
    ]


def _columns(head: Sequence[str], *rows: Sequence[object]) -> list[str]:
    """Return a table as lines: text is aligned left, and numbers are aligned right."""
    cells = [[f"{each:,}" if isinstance(each, int) else str(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [isinstance(each, int) for each in rows[0]] if rows else [False] * len(head)
    return [
        "  ".join(
            f"{each:>{width}}" if numbers else f"{each:{width}}"
            for each, width, numbers in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (list(head), *cells)
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)


def _name(name: str) -> str:
    return printable(repr(name))
