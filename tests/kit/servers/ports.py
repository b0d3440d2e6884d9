"""Finds free ports, for tests that need a port number before a server starts or after it restarts."""

import socket
from contextlib import ExitStack
from secrets import choice

TO_LISTEN_AT = range(20_000, 32_000)
"""Port numbers below Linux's ephemeral ports.

Ephemeral ports are not used, because an outgoing connection may take one before the server starts.
"""
TRIES = 100


def free_port() -> int:
    """Return a port of this machine that is free and cannot be taken by an outgoing connection."""
    return free_ports(1)


def free_ports(in_a_row: int) -> int:
    """Return the first of `in_a_row` consecutive free ports."""
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
