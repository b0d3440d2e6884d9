"""Ports for a test that names one before it is served, or closes one and opens it again."""

import socket
from contextlib import ExitStack
from secrets import choice

TO_LISTEN_AT = range(20_000, 32_000)
"""Below the ports that Linux gives to connections by itself.

Such a connection, of any other test, would take a port that was free a moment before.
"""
TRIES = 100


def free_port() -> int:
    """Return a port of this machine that nothing listens at and no connection takes by chance."""
    return free_ports(1)


def free_ports(in_a_row: int) -> int:
    """Return the first of so many free ports in a row."""
    for _ in range(TRIES):
        first = choice(TO_LISTEN_AT)
        with ExitStack() as probes:
            try:
                for port in range(first, first + in_a_row):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError(f"no {in_a_row} free ports in a row after {TRIES} tries")
