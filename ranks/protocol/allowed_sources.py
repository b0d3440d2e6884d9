"""Allowlist of groups that this rank may read pages from: networks, addresses and host names. Pure."""

import ipaddress
from collections.abc import Sequence
from typing import Final

from ...errors import ConfigError
from .host_port import ip_of, is_ip, split_host


class AllowedSources:
    """The hosts allowed by the setting `allow_sources` of `Peers`; an empty list allows every host."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """Raise `ConfigError` if an entry is not a network, an address or a host name."""
        self._entries: Final = tuple(entries)
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: set[str] = set()
        for each in entries:
            try:
                self._networks.append(ipaddress.ip_network(each.strip("[]")))
            except ValueError as error:
                if "/" in each:
                    raise ConfigError(f"{each!r} is not a network: {error}") from None
                name, port = split_host(each)
                if port is not None:
                    raise ConfigError(f"{each!r} names a port; name the host alone") from None
                self._names.add(_folded(name))

    def excludes(self, host: str) -> bool:
        """Return whether the list excludes `host`, judged without a DNS lookup.

        Returns False if the decision depends on the host's address, which is not known yet.
        """
        if not self._entries or _folded(host) in self._names:
            return False
        return self._is_outside(host) if is_ip(host) else not self._networks

    def require(self, host: str, place: str) -> None:
        """Raise `ConfigError` unless `host`, which resolved to address `place`, is an allowed host."""
        if self._entries and _folded(host) not in self._names and self._is_outside(place):
            raise ConfigError(
                f"{host} ({place}) is not an allowed source; allowed: {', '.join(self._entries)}"
                " (allow_sources of `peers`)"
            )

    def _is_outside(self, place: str) -> bool:
        found = ip_of(place)
        return not any(found in network for network in self._networks)


def _folded(name: str) -> str:
    return name.rstrip(".").lower()
