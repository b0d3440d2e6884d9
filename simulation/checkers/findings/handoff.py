"""Findings about handoffs: requests that do not go on, and what is left of those that have."""

from dataclasses import dataclass

from .finding import Finding, Said


@dataclass(frozen=True, slots=True)
class NotServed(Finding):
    """Requests wait for ever in the group that is to go on with them."""

    served: int
    wanted: int
    after_s: float

    def say(self) -> Said:
        return Said(
            f"the group that decodes has served {self.served} of {self.wanted} requests, and"
            f" {self.after_s:.1f} s after the last one came it serves no more",
            f"Of all requests {self.wanted - self.served} hang: whoever waits for them waits for ever.",
        )


@dataclass(frozen=True, slots=True)
class LeftBehind(Finding):
    """A group at rest still has something of requests that are over."""

    group: str
    what: str

    def say(self) -> Said:
        return Said(
            f"the group that {self.group}s is at rest and has {self.what}",
            f"When all requests are over, the group that {self.group}s still has {self.what}, and"
            " keeps it for ever.",
        )
