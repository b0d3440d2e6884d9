"""Directories of groups by how they are named on the command line."""

from urllib.parse import urlsplit

from ...errors import ConfigError
from ...ranks.disaggregation.groups.directory import GroupDirectory
from ...ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from ...ranks.disaggregation.groups.ray_directory import SCHEME, RayDirectory
from ...storage_backends.host_port import is_loopback
from ..environment import SECRET_VARIABLE, read_secret
from ..meeting import LOOPBACK, address_towards


def host_towards(where: str, named: str) -> str:
    """Return the address at which others in a directory reach this machine.

    `named` is what the user says. Raises `ConfigError` where others reach it, and there is no secret.
    """
    host = named or LOOPBACK
    if not named and "://" in where:
        server = urlsplit(where)
        host = address_towards(server.hostname or LOOPBACK, server.port or 6379)
    if not (is_loopback(host) or read_secret()):
        raise ConfigError(
            f"other machines reach this one at {host}: set {SECRET_VARIABLE}, 16 bytes or more, and"
            " alike for all groups and for whoever sends them requests; or say --host 127.0.0.1"
        )
    return host


def open_directory(where: str) -> GroupDirectory:
    """Return the directory at a path of a file, opened."""
    directory: GroupDirectory
    if "://" not in where:
        directory = EmbeddedDirectory(where)
    elif where.startswith(SCHEME):
        directory = RayDirectory(where.removeprefix(SCHEME))
    else:
        raise ConfigError(f"--directory is {where!r}, must be a path")
    directory.open()
    return directory
