"""Types, checks and parsing that the options of all subcommands share.

Each parameter of a command's function is an option. If the parameter is a dataclass, each of its fields
is an option instead. An option's type, default, bounds and help text are declared only there; cyclopts
reads them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints
from urllib.parse import quote

import msgspec
from cyclopts import App, ArgumentCollection, CycloptsError, Parameter, UnusedCliTokensError
from cyclopts.validators import Number

from ...coordinator.validated_settings import shown
from ...errors import ConfigError
from ...ranks.group.member.log_level import write_log
from ...ranks.protocol.config import RANKS_MAX
from ...storage_backends.base import Capabilities
from ...storage_backends.registry import make_backend
from ...storage_backends.uri import RANK, without_secrets
from ...version import VERSION
from .report_files import check_that_writable

AT_LEAST_1: Final = Parameter(validator=Number(gte=1))
AT_LEAST_0: Final = Parameter(validator=Number(gte=0))
OF_A_GROUP: Final = Parameter(validator=Number(gte=1, lte=RANKS_MAX))
"""Bounds of the options that give a number of ranks."""


def _check_report(_kind: object, path: Path | None) -> None:
    if path is not None:
        check_that_writable(path)


ReportFile = Annotated[
    Path | None,
    Parameter(
        help="Write the report here as JSON.",
        metavar="FILE.json",
        show_default="none",
        validator=_check_report,
    ),
]
Json = Annotated[bool, Parameter("--json", help="Print JSON.")]


def _absolute(_kind: object, tokens: Sequence[Any]) -> str:
    return str(Path(tokens[0].value).resolve())


ABSOLUTE: Final = Parameter(converter=_absolute)
"""Makes a path absolute, because ranks may run in another working directory."""


def numbers_of(hint: object) -> set[object]:
    """Return the number types in an option's type hint: `int`, `float`, both or neither."""
    return {hint}.intersection((int, float)).union(*map(numbers_of, get_args(hint)))


def _check_numbers(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise `ConfigError` for a fraction in an integer option, which cyclopts would round."""
    for argument in arguments:
        rounds = numbers_of(argument.hint) == {int} and argument.parameter.converter is None
        for token in argument.tokens if rounds else ():
            if "." in token.value:
                raise ConfigError(f"{argument.name} is {token.value}, must be a whole number")


def command_line(name: str, **settings: Any) -> App:
    """Return a cyclopts command or command group with the settings that all our commands share."""
    return App(
        name=name,
        version=f"lockstep {VERSION}",
        config=_check_numbers,
        help_flags=("--help", "-h"),
        # Use Markdown, which joins the lines of a wrapped docstring; plain text keeps the line breaks.
        help_format="markdown",
        group_parameters="Options",
        default_parameter=Parameter(
            negative=(),
            allow_repeating=True,
            show_default=lambda value: None if value is False or value == "" else value,
        ),
        **settings,
    )


def run_command(app: App, arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and return its exit status.

    Raises `ConfigError` for wrong arguments. A command group without a command prints its help to
    stderr and returns 2.
    """
    command: Callable[..., int | None]
    try:
        command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        path = " ".join((*app.name, *(error.command_chain or ())))
        why = str(error)
        if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
            why = f"unknown argument {' '.join(error.unused_tokens)}"
        raise ConfigError(f"{why} (see `{path} --help`)") from error
    if command == app.help_print and not {"--help", "-h"} & set(arguments):
        from rich.console import Console

        app.help_print(arguments, console=Console(stderr=True))
        return 2
    write_log()
    return command(*bound.args, **bound.kwargs) or 0


def check_fields(settings: object) -> None:
    """Check each field of the settings against the type, choices and bounds of its option.

    This also checks settings that were not made from a command line. Raises `ConfigError` that names
    the first option with a wrong value.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        kind, *declared = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, msgspec.convert(value, kind))
            for each in declared:
                if value not in (each.choices or (value,)):
                    raise ValueError(f"Must be one of {', '.join(each.choices)}.")
                for validator in each.validator:
                    validator(kind, value)
        except ValueError as error:
            raise ConfigError(f"{option(name)} is {shown(value)}: {error}") from None


def option(name: str) -> str:
    """Return the name of the command-line option for a setting."""
    return f"--{name.replace('_', '-')}"


def check_not_a_path(uri: str, *, name: str = "--store") -> None:
    """Raise `ConfigError` if a store's URI is a bare path; the message has the right URI."""
    if not uri:
        raise ConfigError(f"{name} is empty; give a URI, for example file:///var/kv")
    if ":" not in uri:
        raise ConfigError(
            f"{name} is {without_secrets(uri)!r}, which is not a URI; for a directory write"
            f" file://{quote(str(Path(uri).absolute()), errors='surrogatepass')}"
        )


def check_store(uri: str, *, only_read: bool = False, name: str = "--store") -> Capabilities:
    """Return a store's capabilities; raise `ConfigError` if the store cannot be used.

    `name` is the option or argument that has the URI. With `only_read`, a read-only store is
    accepted.
    """
    check_not_a_path(uri, name=name)
    try:
        # Check the store of rank 0 only, because the URIs of the ranks differ only in the rank number.
        capabilities = make_backend(uri.replace(RANK, "0")).capabilities
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not (capabilities.writes or only_read):
        raise ConfigError(
            f"{name} is {without_secrets(uri)!r}, which is read-only; give a writable store"
        )
    return capabilities
