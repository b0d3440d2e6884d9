"""What a router takes from the engine that has computed a prompt to the one that goes on with it.

vLLM calls it `kv_transfer_params`: the router asks one engine with `do_remote_decode`, and passes what
that engine's answer has, with `do_remote_prefill`, unread to another one.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from ...errors import UsageError

_SCHEME = "peer://"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


class _Params(msgspec.Struct):
    do_remote_prefill: object = None


class _Remote(msgspec.Struct):
    """What counts of the parameters of a request that was computed elsewhere."""

    remote_tokens: Annotated[int, Meta(ge=0)]
    remote_host: str | None = None
    remote_port: Annotated[int, Meta(ge=1, le=(1 << 16) - 1)] | None = None

    def __post_init__(self) -> None:
        host = self.remote_host
        if (host is None) != (self.remote_port is None):
            raise UsageError("remote_host and remote_port must be given together")
        if host is not None and not _HOST.fullmatch(host):
            raise UsageError(
                f"remote_host is {host!r:.80}, must be the name of a host or its address"
            )


def goes_elsewhere(params: object) -> bool:
    """Say whether another engine is to go on after a request's prompt."""
    if not isinstance(params, Mapping):
        return False
    return cast("Mapping[object, object]", params).get("do_remote_decode") is True


class Handoff(msgspec.Struct, frozen=True):
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
        try:
            if msgspec.convert(params, _Params).do_remote_prefill is not True:
                return None
            found = msgspec.convert(params, _Remote)
        except msgspec.ValidationError as error:
            raise UsageError(str(error)) from error
        host = found.remote_host
        source = "" if host is None else f"{_SCHEME}{host}:{found.remote_port}"
        return cls(source, found.remote_tokens)
