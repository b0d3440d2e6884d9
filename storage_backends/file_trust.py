"""Who may have written to a store's directory, looked at once when the store is opened.

A checksum finds what was damaged, not what was forged: whoever can write to the directory can put any
bytes in under any name, for every engine that shares it. So others must not be able to.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError


def check_trust(root: Path, root_fd: int, below: Sequence[str]) -> None:
    """Raise `ConfigError` if anybody can write to the root or to its directories `below`.

    The root may be one where everybody owns what he puts (sticky, as /tmp is): then what is below
    must belong to this user, to the superuser, or to the root's owner.
    """
    top = os.fstat(root_fd)
    _check_mode(root, top)
    owners = {os.geteuid(), 0, top.st_uid}
    for name in below:
        status = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
        _check_mode(root / name, status)
        if status.st_uid not in owners:
            raise ConfigError(
                f"store directory {root / name} belongs to user {status.st_uid}, who could forge "
                "pages; remove it, or add trust=any to the store's URI"
            )


def _check_mode(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"store directory {path} is a link; put a directory in its place")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"store directory {path} can be written to by everybody, who could forge pages; "
            f"run chmod o-w {path}, or add trust=any to the store's URI"
        )
