"""Names of the transports, in a module without numpy so that settings can import it cheaply."""

from enum import StrEnum


class Transport(StrEnum):
    """The transports that can carry the rounds."""

    AUTO = "auto"
    """Choose by host. All ranks on one host: `shm`. Several hosts, at least one with several ranks:
    `hierarchical`. Otherwise: `torch`."""
    TORCH = "torch"
    """Gloo, through `torch.distributed`."""
    SHM = "shm"
    """Shared memory, for ranks of one host."""
    HIERARCHICAL = "hierarchical"
    """Shared memory inside a host, and gloo between one rank of each host."""
