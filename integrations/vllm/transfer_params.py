"""Parameters of disaggregated prefill, which a router carries from the prefill to the decode engine.

The router sends `do_remote_decode` to the prefill engine. Then the router copies `kv_transfer_params`
from the response to the decode engine, without reading them.
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
    """The fields read from a request's parameters if another engine has computed the prompt."""

    remote_tokens: Annotated[int, Meta(ge=0)]
    remote_host: str | None = None
    remote_port: Annotated[int, Meta(ge=1, le=(1 << 16) - 1)] | None = None

    def __post_init__(self) -> None:
        host = self.remote_host
        if (host is None) != (self.remote_port is None):
            raise UsageError("remote_host and remote_port must be given together")
        if host is not None and not _HOST.fullmatch(host):
            raise UsageError(f"remote_host is {host!r:.80}, must be a host name or an address")


def goes_elsewhere(params: object) -> bool:
    """Return whether the parameters say that another engine will continue after the prefill."""
    if not isinstance(params, Mapping):
        return False
    return cast("Mapping[object, object]", params).get("do_remote_decode") is True


class Handoff(msgspec.Struct, frozen=True):
    """Handoff: where another engine can read a prompt's pages, and how many tokens they cover."""

    source: str
    """URI of the group that computed the prompt; empty if the pages are read from a store of both
    engines."""
    tokens: int
    """Number of prompt tokens, in whole pages, that can be read at the response or shortly after it."""

    def params(self, engine_id: str) -> dict[str, Any]:
        """Return the handoff in the form of `kv_transfer_params` for the prefill engine's response."""
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
        """Return the handoff in a request's parameters; None if no other engine computed its prompt.

        Raises `UsageError` for malformed parameters; clients may send values of any type.
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
