"""A clock that advances at every read, for code that waits in agreed time."""


class PassingTime(list[int]):
    """A rank's clock that advances by `pace_ms` at each read, in place of the clocks of `InTurn`."""

    def __init__(self, pace_ms: int) -> None:
        super().__init__([0])
        self.pace_ms = pace_ms

    def __getitem__(self, rank: int) -> int:  # type: ignore[override]
        self[0] = super().__getitem__(0) + self.pace_ms
        return super().__getitem__(0)
