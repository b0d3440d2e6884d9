"""Where a process is reached by others, host:port or [host]:port for IPv6, and when by secret only."""

import ipaddress
import re
from typing import Final

from ...errors import ConfigError

SECRET_BYTES_MIN: Final = 16
"""A shorter secret can be guessed by whoever has heard one handshake."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; raises `ConfigError` for what is no address."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare) != (bare != host) or not port.isascii():
        raise ConfigError(f"{address!r} is no address; write host:port, or [host]:port for IPv6")
    if not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"the port of {address!r} is {port!r}, must be 0 to 65535")
    return bare, int(port)


def split_host(text: str) -> tuple[str, int | None]:
    """Return the host of `text`, which may be a host or an address, and the port that it names.

    Raises `ConfigError` for what is neither.
    """
    bare, port = text, None
    if ":" in text and not is_ip(text):
        if text.startswith("[") and text.endswith("]"):
            bare = text[1:-1]
        else:
            bare, port = split_address(text)
    if not (is_ip(bare) or _NAME.fullmatch(bare)):
        raise ConfigError(f"{text!r} is no host; write a name or an address, or host:port")
    return bare, port


def is_ip(text: str) -> bool:
    """Say whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def ip_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IP address without its zone, as IPv4 if IPv6 has only mapped it."""
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def joined_address(host: str, port: int) -> str:
    """Return host and port as an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_address(host: str, port: int) -> str:
    """Return an address as it is written to be compared: one text for each host and port."""
    return joined_address(str(ip_of(host)) if is_ip(host) else host.rstrip(".").lower(), port)


def require_long_enough(what: str, secret: str) -> None:
    """Raise `ConfigError` for a secret that is too short, or no UTF-8; none is neither."""
    try:
        nbytes = len(secret.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"the secret of {what} has half a character; write it in UTF-8") from None
    if 0 < nbytes < SECRET_BYTES_MIN:
        raise ConfigError(
            f"the secret of {what} has {nbytes} bytes, must be {SECRET_BYTES_MIN} or more"
        )


def is_loopback(host: str) -> bool:
    """Say whether only this machine can be meant by a host. A name other than `localhost` is not."""
    bare = host.strip("[]")
    return ipaddress.ip_address(bare).is_loopback if is_ip(bare) else host == "localhost"
