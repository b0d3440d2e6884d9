"""What a rank counts while it replays."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counts:
    """What happened, in units of their names. The same on every rank, but for corrupt pages."""

    requests: int = 0
    """Requests that were served."""
    refused: int = 0
    """Requests that can never fit the device pool; nothing else counts them."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were computed; with the three hits they make `prompt_tokens`."""
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_storage_tokens: int = 0
    output_tokens: int = 0
    loads_failed: int = 0
    idle_steps: int = 0
    pages_verified: int = 0
    """Pages that came from the cache and were compared byte by byte when they were used."""
    pages_rechecked: int = 0
    """Pages, own and shared, that were compared when their request had finished."""
    pages_corrupt: int = 0
    """Of both, those whose bytes were wrong."""
