"""Help texts and errors of the command, run in an empty directory."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from lockstep.launch.lockstep_command import app
from tests.kit.launch.in_process import Run, refusal, run_lockstep

Words = tuple[str, ...]


def commands_below(found: App, path: Words = ()) -> Iterator[tuple[Words, bool]]:
    """Yield each command as its words (e.g. `store`, `ls`), and whether it has subcommands."""
    below = {name: each for name in found if not name.startswith("-") for each in [found[name]]}
    yield path, bool(below)
    for name, each in below.items():
        yield from commands_below(each, (*path, name))


ALL = list(commands_below(app))
GROUPS = [path for path, is_group in ALL if is_group]


@pytest.fixture
def lockstep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Run]:
    """Runs the command in this process, in an empty directory and on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    yield from run_lockstep(monkeypatch, capfd)


def test_the_help_fits_a_screen_and_says_where_to_begin(lockstep: Run) -> None:
    status, output, _ = lockstep("--help")

    assert status == 0
    assert len(output.splitlines()) <= 24
    assert max(map(len, output.splitlines())) <= 80
    assert "lockstep demo" in output


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_a_list_of_commands_says_of_each_in_one_whole_sentence_what_it_does(
    lockstep: Run, group: Words
) -> None:
    _, output, _ = lockstep(*group, "--help")

    listed = [line for line in output.partition("Commands")[2].splitlines() if line[0:1] == "│"]
    assert listed
    assert [line for line in listed if not re.fullmatch(r"│ \S+ +\S.*[^.]\. +│", line)] == []


@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
def test_every_command_says_what_it_does_and_which_options_it_has(
    lockstep: Run, path: Words, tmp_path: Path
) -> None:
    status, output, stderr = lockstep(*path, "--help")

    assert (status, stderr, list(tmp_path.iterdir())) == (0, "", [])
    assert lockstep(*path, "-h") == (status, output, stderr)
    assert output.startswith(f"Usage: {' '.join(['lockstep', *path])} ")
    assert "─ Options ─" in output or "─ Commands ─" in output or "─ Arguments ─" in output


@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
def test_an_option_that_is_not_there_gets_one_line_and_status_2(
    lockstep: Run, path: Words, tmp_path: Path
) -> None:
    error_line = refusal(lockstep, *path, "--no-such-option")

    assert "--no-such-option" in error_line or "requires an argument" in error_line
    assert error_line.endswith(f"(see `{' '.join(['lockstep', *path])} --help`)\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_a_group_of_commands_without_one_shows_its_help_and_ends_with_2(
    lockstep: Run, group: Words
) -> None:
    status, output, stderr = lockstep(*group)

    assert (status, output) == (2, "")
    assert stderr.startswith("Usage: ")


@pytest.mark.parametrize(
    "line",
    [
        "no-such-command",
        "demo --ranks two",
        "store copy file:///nowhere",
    ],
)
def test_a_wrong_word_gets_one_line_and_status_2(lockstep: Run, line: str, tmp_path: Path) -> None:
    assert refusal(lockstep, *line.split())
    assert list(tmp_path.iterdir()) == []
