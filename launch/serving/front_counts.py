"""What the front of a run has seen."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class FrontCounts:
    """What the front has seen."""

    served: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list[str])
    sent_again: int = 0
    """Requests that were sent once more: their group was lost, or had them no more."""
    prompt_tokens: int = 0
    routed_tokens: int = 0
    """Prompt tokens of all requests, each as often as it was sent."""
    routed_hit_tokens: int = 0
    """Prompt tokens that the chosen groups had, as the router knew."""
    handoffs_us: list[int] = field(default_factory=list[int])
    """From the end of a prompt's last chunk to READY at the group that decodes."""
    first_tokens_us: list[int] = field(default_factory=list[int])
    """From when a request was to come until its prompt was computed."""
    lost: list[str] = field(default_factory=list[str])
    """Groups that were lost."""

    @property
    def left(self) -> int:
        """How many requests have left."""
        return self.served + self.refused
