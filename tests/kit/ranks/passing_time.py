"""A clock that goes on by itself, for what waits in agreed time."""


class PassingTime(list[int]):
    """The clock of one rank, on which so many milliseconds pass with each look.

    It stands in the place of the clocks of `InTurn`.
    """

    def __init__(self, pace_ms: int) -> None:
        super().__init__([0])
        self.pace_ms = pace_ms

    def __getitem__(self, rank: int) -> int:  # type: ignore[override]
        self[0] = super().__getitem__(0) + self.pace_ms
        return super().__getitem__(0)
