"""The two clocks of the replicated state. Neither is this rank's own."""

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """A logical clock, which orders uses, and agreed time, in which deadlines are counted."""

    uses: int = 0
    """Logical time: one more for each command that uses pages."""
    agreed_ms: int = 0
    """Agreed time; 0 while none has been agreed on."""

    def tick(self) -> None:
        """Advance the logical clock."""
        self.uses += 1
