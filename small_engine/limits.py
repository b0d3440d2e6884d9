"""Settings of the small engine's scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the small engine's scheduler; equal on every rank."""

    concurrency: int
    page_tokens: int
    device_pages: int
    prefill_tokens: int
    output_tokens_max: int
    """Maximum number of output tokens per request; 0 means no limit."""
    verify: bool = True
    idle_s: float = 0.003
    """Seconds that a step waits for local progress if no request can compute."""
    idle_steps_max: int = 100_000
    """Number of consecutive steps without progress after which the engine counts as stuck."""
