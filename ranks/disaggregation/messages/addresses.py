"""Addresses of the processes that messages go to: host:port, or [host]:port for IPv6."""

from ....errors import ConfigError


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
