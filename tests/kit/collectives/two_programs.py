"""Two ranks that are programs, each with pipes to the test."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager

from tests.kit.collectives.contract import PATIENCE_S
from tests.kit.programs import program


@contextmanager
def two_programs(
    module: str, *arguments: object
) -> Generator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Run a module as rank 0 and as rank 1, which find their rank before the arguments.

    Leaving the `with` block kills those that still run.
    """
    processes = [
        subprocess.Popen(
            program(module, rank, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints; its own deadline bounds the wait."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
