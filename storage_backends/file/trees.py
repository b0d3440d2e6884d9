"""Removes a directory and everything in it, in small steps.

The store did not create the directory, but found it at the path of an object's file. So the
directory may be very deep, very large, or changing. Every access goes through an open descriptor
and follows no link. The removal may stop after any entry, and the next call continues there.
Subdirectories are moved up before they are removed, so that a deep directory needs neither long
paths nor many descriptors.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(above: int, name: str, *, go_on: Callable[[], bool]) -> bool:
    """Remove the directory `name` in the open directory `above`; return whether it no longer exists.

    Calls `go_on`, which may raise, before each entry, and stops when `go_on` returns False. An entry
    that cannot be removed is skipped without an error.
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
    """Remove the entries of `directory`, which is `top` itself or a directory below `top`.

    If `directory` is below `top`, its subdirectories are moved to `top`, to be removed later.
    Returns whether any subdirectory was moved.
    """
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
