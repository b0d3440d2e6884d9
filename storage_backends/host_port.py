"""Where a process is reached by others, host:port or [host]:port for IPv6, and when by secret only."""

import ipaddress
from typing import Final

from ..errors import ConfigError

SECRET_BYTES_MIN: Final = 16
"""A shorter secret can be guessed by whoever has heard one handshake."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; raises `ConfigError` for what is no address."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare) != (bare != host) or not port.isascii():
        raise ConfigError(f"{address!r} is no address; write host:port, or [host]:port for IPv6")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"the port of {address!r} is {port!r}, must be 0 to 65535")
    return bare, int(port)


def joined_address(host: str, port: int) -> str:
    """Return host and port as an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_long_enough(what: str, secret: bytes) -> None:
    """Raise `ConfigError` for a secret that is too short; none is not."""
    if secret and len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"the secret of {what} has {len(secret)} bytes, must be {SECRET_BYTES_MIN} or more"
        )


def require_secret(host: str, secret: bytes) -> None:
    """Raise `ConfigError` for a secret that is too short, or none where a host is not this machine."""
    require_long_enough("messages", secret)
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"{host} is not this machine alone, and messages have no secret; give all groups and"
            " routers the same one, or use 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Say whether only this machine can be meant by a host. A name other than `localhost` is not."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
