"""A clock that advances at every read, for tests of code that waits until a given time."""


class PassingTime(list[int]):
    """The ranks' clocks for `InTurn`; each read of a clock advances it by `pace_ms`."""

    def __init__(self, pace_ms: int) -> None:
        super().__init__([0])
        self.pace_ms = pace_ms

    def __getitem__(self, rank: int) -> int:  # type: ignore[override]
        self[0] = super().__getitem__(0) + self.pace_ms
        return super().__getitem__(0)
