"""Prompts that share prefixes, some of them identical."""

import random
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 3, 499
FAMILIES = 10
REQUESTS = 200
"""Default number of prompts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request, and the salt of its tenant or None."""

    tokens: tuple[int, ...]
    salt: str | None = None


def mixed_prompts(count: int = REQUESTS) -> list[Prompt]:
    """Return `count` prompts of 25 to 600 tokens."""
    generator = random.Random(1)

    def text(length: int) -> list[int]:
        return [generator.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]

    families = [text(generator.randint(64, 420)) for _ in range(FAMILIES)]
    texts: list[tuple[int, ...]] = []
    for _ in range(count):
        if texts and generator.random() < 0.15:
            tokens = generator.choice(texts)
        else:
            family = generator.choice(families)
            start = family[: generator.randint(20, len(family))]
            tokens = tuple(start + text(generator.randint(5, 180)))
        texts.append(tokens)
    return [Prompt(tokens) for tokens in texts]
