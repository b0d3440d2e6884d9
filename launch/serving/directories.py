"""Directories of groups by how they are named on the command line."""

from ...errors import ConfigError
from ...ranks.disaggregation.groups.directory import GroupDirectory
from ...ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from ...ranks.disaggregation.groups.ray_directory import SCHEME, RayDirectory
from ...ranks.disaggregation.groups.redis_directory import RedisDirectory


def open_directory(where: str) -> GroupDirectory:
    """Return the directory at a path of a file, or at `redis://host:port/db`, opened."""
    directory: GroupDirectory
    if "://" not in where:
        directory = EmbeddedDirectory(where)
    elif where.startswith(("redis://", "rediss://")):
        directory = RedisDirectory(where)
    elif where.startswith(SCHEME):
        directory = RayDirectory(where.removeprefix(SCHEME))
    else:
        raise ConfigError(f"--directory is {where!r}, must be a path, or redis://HOST:PORT/DB")
    directory.open()
    return directory
