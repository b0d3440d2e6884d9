"""Runs the HTTP server of a serving engine (vLLM or SGLang), started by its normal command."""

import os
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.kit.servers.processes import until

START_S = 180.0


@contextmanager
def serving(
    command: Sequence[str], environment: Mapping[str, str], log: Path, port: int
) -> Generator[str]:
    """Start a server, yield its address once it is healthy, and finally kill all of its processes."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or _is_up(address), START_S)
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(address: str) -> bool:
    try:
        with urlopen(f"{address}/health") as answer:  # noqa: S310 - on loopback.
            return bool(answer.status == 200)
    except (URLError, ConnectionError):
        return False
