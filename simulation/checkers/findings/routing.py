"""Findings about groups: what a router believes of their caches, and a cache that stands for theirs."""

from dataclasses import dataclass

from .finding import Finding, Said


@dataclass(frozen=True, slots=True)
class IndexDiffers(Finding):
    """The index says that it is exact, and is not."""

    group: str
    through: int
    too_many: int
    too_few: int

    def say(self) -> Said:
        return Said(
            f"{self.group}: exact through {self.through}, with {self.too_many} pages that are not there"
            f" and without {self.too_few} that are",
            "The router believes to know what a group has cached, and is wrong.",
        )


@dataclass(frozen=True, slots=True)
class HitsDiffer(Finding):
    """The index counts another prefix than its own contents have."""

    group: str
    said: tuple[int, int]
    """Pages on any tier, and on the device."""
    true: tuple[int, int]

    def say(self) -> Said:
        return Said(
            f"{self.group}: a query finds {self.said[0]} pages, {self.said[1]} of them on the device,"
            f" where there are {self.true[0]} and {self.true[1]}",
            "The router counts more or less of a prompt as cached than it has been told.",
        )


@dataclass(frozen=True, slots=True)
class StaysUnknown(Finding):
    """Nothing is lost any more, and still the index is not exact."""

    group: str

    def say(self) -> Said:
        return Said(
            f"{self.group}: not exact after an answer that nothing was lost of",
            "The router does not find out what a group has cached, though nothing hinders it.",
        )


@dataclass(frozen=True, slots=True)
class CacheDiffers(Finding):
    """The cache of the routing simulation does something else than a replica."""

    request: str
    said: tuple[int, int]
    """Pages that were hit, and that were displaced."""
    true: tuple[int, int]
    apart: int
    """How many pages only one of them has cached."""

    def say(self) -> Said:
        return Said(
            f"{self.request}: {self.said[0]} pages hit and {self.said[1]} displaced, where a replica"
            f" has {self.true[0]} and {self.true[1]}; {self.apart} pages are cached in one of them"
            " alone",
            "The cache of the routing simulation does not keep what a real one would.",
        )
