"""Protocol scenarios: each file states the outcome of every command and every round.

`make scenarios` rewrites the outcomes; review the differences of the files.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from lockstep.coordinator.expectations import Expectation
from lockstep.ranks.protocol.events import Event
from lockstep.ranks.protocol.orders import Order
from tests.kit.scenarios.language import parse
from tests.kit.scenarios.run import run_here
from tests.kit.scenarios.text import spaced
from tests.kit.scenarios.workers import Workers

FILES = sorted(Path(__file__).parent.glob("*.txt"))
EVERY_SCENARIO = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(3) as started:
        yield started


@EVERY_SCENARIO
def test_ranks_that_have_a_replica_each_do_what_the_scenario_says(
    file: Path, request: pytest.FixtureRequest
) -> None:
    text = run_here(parse(file.read_text()))

    write_if_requested(file, text, request.config)
    assert text == file.read_text()


def write_if_requested(file: Path, text: str, config: pytest.Config) -> None:
    """Rewrite a scenario file if `make scenarios` requests it."""
    if config.getoption("write_scenarios"):
        file.write_text(text)


@EVERY_SCENARIO
def test_one_replica_and_ranks_in_processes_of_their_own_do_the_same(
    file: Path, workers: Workers
) -> None:
    assert workers.run(parse(file.read_text())) == file.read_text()


def test_every_order_expectation_and_event_appears_in_some_scenario() -> None:
    lines = [line for file in FILES for line in file.read_text().splitlines()]
    unnumbered = {re.sub(r"^event \d+", "event", line) for line in lines}

    missing = [
        f"{start}: {spaced(kind.__name__)}"
        for start, kinds in (("order", Order), ("expect", Expectation), ("event", Event))
        for kind in get_args(kinds)
        if not any(line.startswith(f"{start}: {spaced(kind.__name__)}") for line in unnumbered)
    ]

    assert missing == []


def test_a_report_that_may_be_about_two_operations_is_refused() -> None:
    scenario = parse(
        "# Two lookups.\nsettings:\n\nprefetch a A\n\nprefetch b B\n\nrank 0: answered 1"
    )

    with pytest.raises(ValueError, match=r"operations \[1, 2\]; write 'op 1 answered'"):
        run_here(scenario)
