"""Removes a directory with all that is in it, a little at a time.

Such a directory came into a store by mistake, so nothing is known of it: it may be very deep, hold very
much, or change meanwhile. It is reached by open descriptors, and no link is followed. The removal may
stop after any entry, and the next one goes on with what is left. What lies deep is moved up first, so
that no path is long, and the depth costs no descriptors.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(above: int, name: str, *, go_on: Callable[[], bool]) -> bool:
    """Remove the directory `name` below the open directory `above`; say whether it is gone.

    `go_on` is asked before each entry, and may raise; it stops where that says False. What cannot
    be removed stays, and is no error.
    """
    try:
        top = os.open(name, _DIRECTORY, dir_fd=above)
        try:
            while _clear(top, top, go_on):
                pass
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=above)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _clear(top: int, directory: int, go_on: Callable[[], bool]) -> bool:
    """Empty a directory, `top` or one in it; say whether others were moved up, for the next time."""
    moved = False
    with os.scandir(directory) as entries:
        for entry in entries:
            if not go_on():
                return False
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=directory)
                elif directory == top:
                    moved |= _clear_below(top, entry.name, go_on)
                    os.rmdir(entry.name, dir_fd=top)
                else:
                    name = secrets.token_hex(16)
                    os.rename(entry.name, name, src_dir_fd=directory, dst_dir_fd=top)
                    moved = True
    return moved


def _clear_below(top: int, name: str, go_on: Callable[[], bool]) -> bool:
    directory = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        return _clear(top, directory, go_on)
    finally:
        os.close(directory)
