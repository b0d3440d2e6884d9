"""Prompts that share prefixes, branch within and between pages, and repeat or continue others."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from .world import World

TOKEN_BYTES = 4
_SEGMENT_WORDS = 50
_ASKED_AGAIN = 10
"""Number of requests after a restart that mostly repeat earlier prompts, to test cache hits."""
_OUTPUT_WORDS = 2
"""Number of different words in answers; small, so that answers of several requests often begin alike.
"""


@dataclass(slots=True)
class _Branch:
    """A piece of text that several prompts may share, with its possible continuations."""

    tokens: bytes
    branches: list["_Branch"] = field(default_factory=list["_Branch"])


class Prompts:
    """Draws the prompts and answers of one schedule."""

    def __init__(self, world: World) -> None:
        self._random = world.stream("prompts")
        self._page_tokens = world.page_tokens
        self._tokens_max = world.prompt_pages_max * world.page_tokens
        self._sparse = bool(world.config.components)
        self._roots = [self._grow(0, 0) for _ in range(self._random.randint(1, 3))]
        self._earlier: list[tuple[str, bytes]] = []
        self._asked_again = 0
        self._checkpoint_tokens = world.checkpoint_tokens or 0

    def begin_epoch(self) -> None:
        """Make the next prompts repeat prompts from before the restart."""
        self._asked_again = _ASKED_AGAIN

    def draw(self) -> tuple[str, bytes]:
        """Return (namespace, tokens) of a new prompt of at least two tokens."""
        draw = self._random.random()
        again, further = (0.35, 0.6) if self._sparse else (0.22, 0.4)
        at_checkpoint = False
        if self._asked_again:
            self._asked_again -= 1
            again, further = 0.8, 0.9
            at_checkpoint = self._checkpoint_tokens > 0 and self._random.random() < 0.9
        if self._earlier and draw < again:
            namespace, tokens = self._random.choice(self._earlier)
            if at_checkpoint:
                # End the prompt one token after a checkpoint. The last token is always computed, so a
                # match can reach exactly to the checkpoint.
                step = self._checkpoint_tokens * TOKEN_BYTES
                tokens = tokens[: len(tokens) // step * step] + _words(
                    self._random, 1, _SEGMENT_WORDS
                )
        elif self._earlier and draw < further:
            namespace, tokens = self._random.choice(self._earlier)
            tokens += _words(self._random, self._page_tokens * 2, _SEGMENT_WORDS)
        else:
            namespace = "tenant" if self._random.random() < 0.12 else ""
            tokens = self._walk()
        tokens = tokens[: self._tokens_max * TOKEN_BYTES]
        while len(tokens) < 2 * TOKEN_BYTES:
            tokens += _words(self._random, 1, _SEGMENT_WORDS)
        return namespace, tokens

    def earlier(self, random: Random) -> tuple[str, bytes]:
        """Return (namespace, tokens) of an earlier request; if there was none, of a fixed prompt."""
        return random.choice(self._earlier) if self._earlier else ("", self._roots[0].tokens)

    @property
    def earliest_first(self) -> Sequence[tuple[str, bytes]]:
        """(namespace, tokens) of earlier requests, in the order in which the requests finished."""
        return self._earlier

    def remember(self, namespace: str, tokens: bytes) -> None:
        """Let later prompts repeat or continue `tokens`, the prompt and answer of a request."""
        self._earlier.append((namespace, tokens))
        if len(self._earlier) > 24:
            del self._earlier[self._random.randrange(len(self._earlier))]

    def answer(self, tokens_max: int) -> bytes:
        """Return up to `tokens_max` tokens of an answer, at least one."""
        return _words(self._random, self._random.randint(1, tokens_max), _OUTPUT_WORDS)

    def _grow(self, depth: int, start: int) -> _Branch:
        """Return a random text that begins at token `start`, with all its continuations."""
        length = self._random.randint(1, 3 * self._page_tokens)
        choices = (1, 1, 2, 2, 3)
        if self._sparse:
            # A recurrent state is kept only at some positions. Draw more branches, often at a page's
            # end, so that prompts diverge both at these positions and between them.
            choices = (1, 2, 2, 3, 3)
            if self._random.random() < 0.6:
                length += -(start + length) % self._page_tokens
        branch = _Branch(_words(self._random, length, _SEGMENT_WORDS))
        if depth < 4:
            for _ in range(self._random.choice(choices) if depth < 3 else 1):
                branch.branches.append(self._grow(depth + 1, start + length))
        return branch

    def _walk(self) -> bytes:
        branch = self._random.choice(self._roots)
        tokens = branch.tokens
        while branch.branches and self._random.random() < (0.95 if self._sparse else 0.85):
            branch = self._random.choice(branch.branches)
            tokens += branch.tokens
        if self._random.random() < 0.3:
            tokens = tokens[: self._random.randint(1, len(tokens) // TOKEN_BYTES) * TOKEN_BYTES]
        if self._random.random() < 0.25:
            tokens += _words(self._random, self._page_tokens * 3, _SEGMENT_WORDS)
        return tokens


def _words(random: Random, length: int, words: int) -> bytes:
    return array("i", [random.randrange(words) for _ in range(length)]).tobytes()
