"""Model profiles for schedules: which components a model has, and how large their pools are."""

from collections.abc import Mapping
from random import Random

from ...page_format.page_layout import Column, PageLayout
from ...ranks.protocol.config import ComponentConfig, Recurrent, SlidingWindow

LLAMA = "llama"

MODEL_PROFILES: Mapping[str, tuple[str, ...]] = {
    LLAMA: (),
    "gemma": (SlidingWindow.kind,),
    "qwen-next": (Recurrent.kind,),
    "hybrid-all": (SlidingWindow.kind, Recurrent.kind),
}
"""Values of `lockstep simulate --profile`, each with its components besides full attention."""


def draw_components(
    random: Random,
    profile: str,
    *,
    page_tokens: int,
    heads: int,
    requests_max: int,
    prompt_pages_max: int,
    tiny: bool,
) -> tuple[ComponentConfig, ...]:
    """Draw window and state components as `profile` says; `tiny` makes their pools small."""
    components: list[ComponentConfig] = []
    for kind in MODEL_PROFILES[profile]:
        if kind == SlidingWindow.kind:
            window_pages = random.randint(1, 5)
            device_pages, host_pages = _draw_window_pools(
                random, requests_max, prompt_pages_max, tiny=tiny
            )
            components.append(
                SlidingWindow(
                    window_tokens=window_pages * page_tokens - random.randrange(page_tokens),
                    layout=_layout(kind, page_tokens, heads),
                    device_pages=max(device_pages, window_pages + 1),
                    host_pages=host_pages,
                )
            )
        else:
            device_pages, host_pages = _draw_state_pools(random, requests_max, tiny=tiny)
            components.append(
                Recurrent(
                    checkpoint_tokens=random.choice((1, 1, 2, 2, 3, 4)) * page_tokens,
                    layout=_layout(kind, 1, heads),
                    device_pages=device_pages,
                    host_pages=host_pages,
                )
            )
    return tuple(components)


def _layout(name: str, page_tokens: int, heads: int) -> PageLayout:
    column = Column(name=name, layers=1, heads=heads, elements=1, dtype="uint8")
    return PageLayout(page_tokens=page_tokens, columns=(column,))


def _draw_window_pools(
    random: Random, requests: int, prompt_pages: int, *, tiny: bool
) -> tuple[int, int]:
    """Draw (device, host) pages of a window pool; usually the pages of one whole prompt fit."""
    in_use = requests * (prompt_pages + 4)
    if tiny:
        device_pages = random.choice(
            (
                random.randint(1 + prompt_pages // 2, prompt_pages),
                random.randint(prompt_pages, prompt_pages + in_use // 3),
                in_use,
            )
        )
        return device_pages, random.choice((random.randint(1, prompt_pages), prompt_pages * 3, 100))
    device_pages = random.choice((prompt_pages + 4 + in_use // 2, in_use, in_use + 60))
    return device_pages, random.choice((in_use // 2 + prompt_pages, 100))


def _draw_state_pools(random: Random, requests: int, *, tiny: bool) -> tuple[int, int]:
    """Draw (device, host) slots of a state pool; each request in flight needs a device slot."""
    if tiny:
        device_pages = random.choice((2, 2, 1 + (requests + 1) // 2, requests + 1, requests * 3))
        return device_pages, random.choice((1, 2, 4, 40))
    device_pages = requests + random.choice((2, requests, 20, 60))
    return device_pages, random.choice((10, 40, 100))
