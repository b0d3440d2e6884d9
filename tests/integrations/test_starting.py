"""Output at an engine's start: lines in the engine's format, with the error last."""

import io
import logging
import traceback
from collections.abc import Iterator

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.starting import Lockstep, ending_the_start, log_as


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """Lockstep's logger, restored after the test."""
    log = logging.getLogger("lockstep")
    before = log.handlers[:], log.propagate, log.level
    yield log
    log.handlers, log.propagate, log.level = before


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything that a logger named `engine` writes."""
    engine, handler = logging.getLogger("engine"), logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(process)d %(levelname)s %(name)s: %(message)s"))
    engine.addHandler(handler)
    engine.setLevel(logging.INFO)
    yield handler.stream
    engine.removeHandler(handler)


def test_lines_of_stores_and_peers_are_in_the_engine_s_format_once(
    ours: logging.Logger, lines: io.StringIO
) -> None:
    for _ in range(2):
        log_as("engine")
    logging.getLogger("lockstep.storage_backends.file").info("a line")
    logging.getLogger("lockstep.storage_backends.file").debug("another")

    assert [each.partition(" ")[2] for each in lines.getvalue().splitlines()] == [
        "INFO lockstep.storage_backends.file: a line"
    ]
    assert not ours.propagate


def test_a_user_s_own_handlers_and_an_engine_that_has_none_are_left_alone(
    ours: logging.Logger, lines: io.StringIO
) -> None:
    log_as("an engine that logs nothing")
    none = ours.handlers[:]
    own = logging.NullHandler()
    ours.handlers = [own]
    log_as("engine")

    assert (none, ours.handlers) == ([], [own])


def test_an_error_in_the_configuration_ends_a_traceback_with_our_name() -> None:
    with pytest.raises(Lockstep) as ended, ending_the_start():
        raise ConfigError("x is 0, must be 1")

    assert not isinstance(ended.value, ValueError)
    assert traceback.format_exception(ended.value)[-1] == "Lockstep: x is 0, must be 1\n"
