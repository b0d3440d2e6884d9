"""Parses, formats and compares addresses (host:port, [IPv6]:port), and checks secrets."""

import ipaddress
import re
from typing import Final

from ...errors import ConfigError

SECRET_BYTES_MIN: Final = 16
"""Minimum length of a secret in bytes. An attacker who has recorded one handshake could guess a shorter
secret."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `address`; raise `ConfigError` if it does not have this form."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare) != (bare != host) or not port.isascii():
        raise ConfigError(
            f"{address!r} is not an address; write host:port, or [host]:port for IPv6"
        )
    if not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"the port of {address!r} is {port!r}, must be 0 to 65535")
    return bare, int(port)


def split_host(text: str) -> tuple[str, int | None]:
    """Return (host, port) of `text`; the port is None if `text` is only a host.

    Raises `ConfigError` if `text` is neither a host nor an address host:port.
    """
    bare, port = text, None
    if ":" in text and not is_ip(text):
        if text.startswith("[") and text.endswith("]"):
            bare = text[1:-1]
        else:
            bare, port = split_address(text)
    if not (is_ip(bare) or _NAME.fullmatch(bare)):
        raise ConfigError(f"{text!r} is not a host; write a name or an address, or host:port")
    return bare, port


def is_ip(text: str) -> bool:
    """Return whether `text` is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def ip_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address without its zone. An IPv4-mapped IPv6 address becomes IPv4."""
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def joined_address(host: str, port: int) -> str:
    """Format host and port as an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_address(host: str, port: int) -> str:
    """Return the canonical text of an address. Different spellings of one address give equal texts."""
    return joined_address(str(ip_of(host)) if is_ip(host) else host.rstrip(".").lower(), port)


def require_long_enough(what: str, secret: str) -> None:
    """Raise `ConfigError` if `secret` is too short or not valid UTF-8. An empty secret is accepted."""
    try:
        nbytes = len(secret.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"the secret of {what} has half a character; write it in UTF-8") from None
    if 0 < nbytes < SECRET_BYTES_MIN:
        raise ConfigError(
            f"the secret of {what} has {nbytes} bytes, must be {SECRET_BYTES_MIN} or more"
        )


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or `localhost`. Other names are not resolved."""
    bare = host.strip("[]")
    return ipaddress.ip_address(bare).is_loopback if is_ip(bare) else host == "localhost"
