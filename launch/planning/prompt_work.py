"""How much work a prompt is, in floating-point operations, and how much of it a cached prefix saves.

Every token passes the weights of its layers once, at two operations a weight (of experts, those that it
is sent to). In each layer a token at position p attends to the p + 1 tokens up to its own, or to the
last of them where the layer has a window, or chooses some; each pair of tokens costs two operations for
each element of a key and of a value, in each head. So a prefix of half the tokens saves less than half
of the work. Embeddings, norms and what a recurrent layer adds beside its weights count for nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attended:
    """What layers of one kind do for each pair of tokens."""

    operations: int
    """For each pair, of all these layers together."""
    span: int | None = None
    """The most tokens that one attends to; None stands for all before it."""

    def pairs(self, tokens: int) -> int:
        """Return the pairs of the first so many tokens of a prompt."""
        ramp = tokens if self.span is None else min(tokens, self.span)
        return ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What a model computes for a prompt."""

    weights: int
    """Weights that each token passes."""
    attended: tuple[Attended, ...]

    def operations(self, tokens: int) -> int:
        """Return the operations of the first so many tokens of a prompt."""
        pairs = sum(each.operations * each.pairs(tokens) for each in self.attended)
        return 2 * self.weights * tokens + pairs
