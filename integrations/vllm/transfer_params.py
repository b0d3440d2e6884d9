"""What a router takes from the engine that has computed a prompt to the one that goes on with it.

vLLM calls it `kv_transfer_params`: the router asks one engine with `do_remote_decode`, and passes what
that engine's answer has, with `do_remote_prefill`, unread to another one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...errors import UsageError

_SCHEME = "peer://"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_PORT_MAX = (1 << 16) - 1


def goes_elsewhere(params: object) -> bool:
    """Say whether another engine is to go on after a request's prompt."""
    return _is_mapping(params) and params.get("do_remote_decode") is True


@dataclass(frozen=True, slots=True)
class Handoff:
    """Where another engine goes on: what it can read, and where."""

    source: str
    """The URI of the group that has computed it; empty where it is in the store of both."""
    tokens: int
    """How many tokens of the prompt there are to be, in whole pages, a moment after the answer."""

    def params(self, engine_id: str) -> dict[str, Any]:
        """Return it for the answer of an engine, which may add to it."""
        host, _, port = self.source.removeprefix(_SCHEME).rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine_id,
            "remote_host": host or None,
            "remote_port": int(port) if port else None,
            "remote_tokens": self.tokens,
        }

    @classmethod
    def read(cls, params: object) -> "Handoff | None":
        """Return what a request came with; None if it was computed nowhere else.

        Raises `UsageError` for what no engine of ours has answered: it may come from anybody who can
        send requests, and may be of any type.
        """
        if params is None:
            return None
        if not _is_mapping(params):
            raise UsageError(f"they are a {type(params).__name__}, must be a map")
        if params.get("do_remote_prefill") is not True:
            return None
        host, port, tokens = (params.get(f"remote_{each}") for each in ("host", "port", "tokens"))
        if not _is_number(tokens) or tokens < 0:
            raise UsageError(f"remote_tokens is {tokens!r:.80}, must be a number of tokens")
        if host is None and port is None:
            return cls("", tokens)
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise UsageError(
                f"remote_host is {host!r:.80}, must be the name of a host or its address"
            )
        if not _is_number(port) or not 0 < port <= _PORT_MAX:
            raise UsageError(f"remote_port is {port!r:.80}, must be 1 to {_PORT_MAX}")
        return cls(f"{_SCHEME}{host}:{port}", tokens)


def _is_mapping(value: object) -> TypeGuard[Mapping[object, Any]]:
    return isinstance(value, Mapping)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
