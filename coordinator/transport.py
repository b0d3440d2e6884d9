"""The transports' names, apart from what carries rounds: settings and the command need no numpy."""

from enum import StrEnum


class Transport(StrEnum):
    """The transports that can carry the rounds."""

    AUTO = "auto"
    """`shm` for ranks of one host, `hierarchical` where several share a host, otherwise `torch`."""
    TORCH = "torch"
    """Gloo, through `torch.distributed`."""
    SHM = "shm"
    """Shared memory; for ranks of one host."""
    HIERARCHICAL = "hierarchical"
    """Shared memory inside a host, gloo between one rank of each."""
