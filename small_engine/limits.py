"""Limits of the scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the scheduler, equal on every rank."""

    concurrency: int
    page_tokens: int
    device_pages: int
    prefill_tokens: int
    output_tokens_max: int
    """Maximum number of output tokens per request; 0 means no limit."""
    verify: bool = True
    idle_s: float = 0.003
    """How long a step waits for local progress if nothing can be computed."""
    idle_steps_max: int = 100_000
    """The engine counts as stuck after this many consecutive steps without progress."""
