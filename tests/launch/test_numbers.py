"""Every numeric option refuses invalid numbers with one line and status 2."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from cyclopts import Argument, CycloptsError
from cyclopts.validators import Number

from lockstep.errors import ConfigError
from lockstep.launch.cli.options import numbers_of
from lockstep.launch.lockstep_command import app
from tests.kit.launch.in_process import Run, refusal, run_lockstep
from tests.launch.test_help import ALL, Words

LEGAL = {
    ("plan", "--storage-gib", "inf"),
    ("plan", "--storage-gib", "1e+300"),
    # The command itself refuses this number, because the largest number that fits depends on the
    # page size.
    ("size", "--tokens", "1e+300"),
}
"""Extreme values that the number check of an option accepts; the command may refuse them later, with a
more specific error."""
NEEDED = {"--page-bytes": "8192", "--store": "file:///nowhere", "--tokens": "1"}
"""Values of required arguments of commands, by name. A required argument without an entry gets a path.
"""


def options() -> Iterator[tuple[Words, Argument, list[str]]]:
    """Yield every numeric option, with its command and the arguments that the command requires."""
    for path, is_group in ALL:
        found = app
        for word in path:
            found = found[word]
        arguments = [] if is_group else list(found.assemble_argument_collection())
        for argument in arguments:
            beside = [each for each in arguments if each.required and each is not argument]
            given = [
                f"{each.name}={NEEDED[each.name]}" if each.name in NEEDED else "/nowhere"
                for each in beside
                if each.name != "*"
            ]
            if numbers_of(argument.hint):
                yield path, argument, given


def wrong_for(argument: Argument) -> Iterator[str]:
    takes_fractions = float in numbers_of(argument.hint)
    yield from ("nan", "inf", "1e+300", "text", "", "-1.0" if takes_fractions else "-1")
    if not takes_fractions:
        yield "1.5"
    given = cast("tuple[object, ...]", argument.parameter.validator)
    bounds = [each for each in given if isinstance(each, Number)]
    if any((each.gte or 0) > 0 or each.gt == 0 for each in bounds):
        yield "0.0" if takes_fractions else "0"


def is_taken(line: list[str]) -> bool:
    try:
        app.parse_args(line, exit_on_error=False, print_error=False)
    except (CycloptsError, ConfigError):
        return False
    return True


def words(text: str) -> set[str]:
    return {each.strip(".,:;()\"'") for each in text.split()} | {""}


CASES = list(options())


@pytest.fixture
def lockstep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    yield from run_lockstep(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("path", "argument", "beside"), CASES, ids=[" ".join((*a, b.name)) for a, b, _ in CASES]
)
def test_what_is_no_sensible_number_is_refused_by_its_option_and_its_value(
    lockstep: Run, path: Words, argument: Argument, beside: list[str]
) -> None:
    lines = {
        wrong: [*path, *beside, f"{argument.name}={wrong}"]
        for wrong in wrong_for(argument)
        if (*path, argument.name, wrong) not in LEGAL
    }

    assert [wrong for wrong, line in lines.items() if is_taken(line)] == []
    errors = {wrong: refusal(lockstep, *line) for wrong, line in lines.items()}
    assert [
        text for wrong, text in errors.items() if not {argument.name, wrong} <= words(text)
    ] == []
