"""What bounds a scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Bounds the scheduler. Equal on every rank."""

    concurrency: int
    page_tokens: int
    device_pages: int
    prefill_tokens: int
    output_tokens_max: int
    """0 stands for no limit."""
    verify: bool = True
    idle_s: float = 0.003
    """How long a step waits for local progress when there is nothing to compute."""
    idle_steps_max: int = 100_000
    """Steps in a row in which no request moves, after which the engine is taken for stuck."""
