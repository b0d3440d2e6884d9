"""Model profiles: the geometry of real models, scaled down so that a replay fits any machine.

A profile keeps what decides how the cache behaves (which columns a page has, KV heads that ranks
divide between them, the element type) and divides what only costs memory (layers, elements).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..ranks.page_layout import Column, PageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The parts of a model's geometry that a page's size depends on."""

    layers: int
    kv_heads: int
    head_elements: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.kv_heads} KV heads, {self.head_elements} elements a head"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model as a replay sees it."""

    name: str
    model: str
    """The real model."""
    real: Geometry
    scaled: Geometry
    columns: Callable[[Geometry], tuple[Column, ...]]

    def layout(self, page_tokens: int) -> PageLayout:
        """Return the scaled page layout."""
        return PageLayout(page_tokens=page_tokens, columns=self.columns(self.scaled))

    @property
    def scale(self) -> str:
        """One line that says what was scaled, and by how much."""
        real = PageLayout(page_tokens=1, columns=self.columns(self.real)).shard(0, 1).page_bytes
        scaled = self.layout(1).shard(0, 1).page_bytes
        return (
            f"{self.name}: {self.model} ({self.real}) scaled to {self.scaled}: "
            f"{scaled} bytes a token instead of {real}, 1/{real // scaled}"
        )


def _keys_and_values(geometry: Geometry) -> tuple[Column, ...]:
    return tuple(
        Column(
            name=name,
            layers=geometry.layers,
            heads=geometry.kv_heads,
            elements=geometry.head_elements,
            dtype="bfloat16",
        )
        for name in ("k", "v")
    )


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="llama",
            model="Llama-3-8B",
            real=Geometry(layers=32, kv_heads=8, head_elements=128),
            scaled=Geometry(layers=2, kv_heads=8, head_elements=4),
            columns=_keys_and_values,
        ),
    )
}
"""The profiles by name."""


def find_profile(name: str) -> Profile:
    """Return the profile, or raise `ConfigError` that lists the known ones."""
    if name not in PROFILES:
        raise ConfigError(f"unknown profile {name!r}; known: {', '.join(sorted(PROFILES))}")
    return PROFILES[name]
