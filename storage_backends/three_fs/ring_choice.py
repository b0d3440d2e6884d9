"""Which rings a directory is asked through: those of 3FS itself, or system calls."""

from pathlib import Path

from .pread_rings import PreadRings
from .rings import RingClient
from .usrbio_rings import UsrbioRings, find_mount, load_client


def choose_rings(directory: Path) -> RingClient:
    """Return USRBIO where `directory` is on a mounted 3FS and its client is installed.

    Elsewhere the same rings over system calls, which say why.
    """
    client = load_client()
    if client is None:
        return PreadRings("the USRBIO client (hf3fs_py_usrbio) is not installed")
    mount = find_mount(client, directory)
    if mount is None:
        return PreadRings(f"{directory} is not on a mounted 3FS")
    return UsrbioRings(client, mount)
