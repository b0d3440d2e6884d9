from collections.abc import Callable, Sequence
from typing import Protocol

class _Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], _Kernel]: ...
