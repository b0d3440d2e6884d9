"""What the benchmark of how long handoffs take measures, and what its processes have seen."""

from dataclasses import dataclass
from typing import Final

from ...errors import ConfigError

PROMPTS: Final = (8192, 32_768, 131_072)
RATIOS: Final = (1.5, 0.2)
PAGE_TOKENS: Final = 64
TOKENS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """Says what is measured."""

    prompts: tuple[int, ...] = PROMPTS
    ratios: tuple[float, ...] = RATIOS
    """How many times as long a chunk is computed as its pages travel."""
    chunk_tokens: int = 4096
    token_bytes: int = 8192
    """The KV of a token, which is also a head's and a layer's: the cache moves pages as they are."""
    repeats: int = 5
    checksums: bool = False
    """Whether each prompt is handed over once more without checksums of its pages."""

    def __post_init__(self) -> None:
        if not self.prompts or not self.ratios:
            raise ConfigError("there is nothing to measure: give --prompt-tokens and --ratio")
        for name, value, most in (
            *(("--prompt-tokens", each, TOKENS_MAX) for each in self.prompts),
            ("--chunk-tokens", self.chunk_tokens, TOKENS_MAX),
            ("--token-bytes", self.token_bytes, 1 << 20),
            ("--repeats", self.repeats, 1000),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}, must be 1 to {most}")
        for ratio in self.ratios:
            if not 0 <= ratio <= 1000:
                raise ConfigError(f"--ratio is {ratio}, must be 0 to 1000")
        if self.chunk_tokens % PAGE_TOKENS:
            raise ConfigError(
                f"--chunk-tokens is {self.chunk_tokens}, must be whole pages of {PAGE_TOKENS}"
            )

    @property
    def pages(self) -> int:
        """The pages that each pool has: for the longest prompt, and the one before it."""
        return 2 * -(-max(*self.prompts, self.chunk_tokens) // PAGE_TOKENS) + 8


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt that is handed over."""

    ratio: float
    prompt_tokens: int
    checked: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """When one process began with a prompt and was through with it, by the clock that both share."""

    began_s: float
    done_s: float
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Moments:
    """What one process has seen."""

    transfer_s: float
    of_jobs: list[Moment]


def jobs(settings: LatencySettings) -> list[Job]:
    """Return the prompts in their order. What is compared comes right after each other, in turns."""
    return [
        Job(ratio, prompt, checked)
        for ratio in settings.ratios
        for prompt in settings.prompts
        for number in range(settings.repeats)
        for checked in _ways(settings, number)
    ]


def _ways(settings: LatencySettings, number: int) -> tuple[bool, ...]:
    if not settings.checksums:
        return (True,)
    return (True, False) if number % 2 else (False, True)
