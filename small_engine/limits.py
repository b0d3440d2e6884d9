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
    token_us: float = 0.0
    """How long the forward pass takes for each token at least, in microseconds: as long as a real
    model's would, where what is measured depends on that."""
    idle_s: float = 0.003
    """How long a step waits for local progress when there is nothing to compute."""
    idle_steps_max: int = 100_000
    """Steps in a row in which no request moves, after which the engine is taken for stuck."""
    requests_max: int = 1024
    """The most requests in a group that is told of them by messages; it refuses more."""
    prompt_tokens_max: int = 1 << 26
    """The most tokens that the prompts of these have together, which are kept in memory."""
