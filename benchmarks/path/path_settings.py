"""Settings of the path benchmark, checked on construction."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from cyclopts.validators import Number

from ...errors import ConfigError
from ...page_format.page_layout import Column, PageLayout
from ...storage_backends.file.backend import THREADS
from ...storage_backends.three_fs.sizes import SLOT_BYTES, ThreeFsOptions
from ...storage_backends.uri import StoreUri, parse_uri
from ..agreement_settings import Ranks
from ..byte_sizes import BYTES
from ..storage import IN_DIRECTORIES, limit_directory
from .bare_files import is_in_memory

TURNS: Final = 6
PROMPTS: Final = 4
"""The number of prompts whose pages are moved concurrently, as in an engine with several waiting
requests."""
PAGE_TOKENS: Final = 16
LAYERS_MAX: Final = 32
_ELEMENTS: Final = 128
_UNIT_BYTES: Final = 2 * PAGE_TOKENS * _ELEMENTS * 2
"""Number of bytes of one head of one layer in a KV page, keys and values together, in bfloat16."""
_THREAD_OPTIONS: Final = {"file": ("threads", THREADS), "3fs": ("rings", ThreeFsOptions.rings)}
"""For each scheme of store: (URI option that sets the number of threads, the option's default)."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings:
    """The options of `lockstep bench path`: a group of ranks, its store, and the amount of data."""

    store: Annotated[str, Parameter(metavar="URI")]
    """The store, as a URI; the benchmark removes what it writes."""
    page_bytes: Annotated[
        int, BYTES, Parameter(validator=Number(gte=1, lte=1 << 28, modulo=_UNIT_BYTES))
    ]
    """Bytes of one rank's share of a KV page, stored as one object, such as 262144 or 1MiB."""
    ranks: Ranks = 1
    """The number of ranks, one process each."""
    rank_bytes: Annotated[
        int, BYTES, Parameter("--bytes", validator=Number(lte=1 << 40), show_default="1.5GiB")
    ] = 1536 << 20
    """Total bytes of the KV pages of one rank."""
    cold: bool = False
    """Whether to drop the store's files from the page cache before they are read."""
    model: Annotated[str, Parameter(parse=False)] = "bench-path"
    """A unique model name, so that the benchmark's pages are separate from others in the store."""

    def __post_init__(self) -> None:
        least = TURNS * PROMPTS * self.page_bytes
        if self.rank_bytes < least:
            raise ConfigError(f"--bytes is {self.rank_bytes}, must be {least} or more")
        if self.cold and not self.in_directory:
            raise ConfigError(f"--cold: the store is {self.uri.text!r}, must be file:// or 3fs://")
        if self.cold and is_in_memory(self.limit_directory):
            raise ConfigError(
                f"--cold: {self.limit_directory} is in memory and has no page cache; give a store on"
                " a disk"
            )

    @property
    def uri(self) -> StoreUri:
        return parse_uri(self.store)

    @property
    def prompt_pages(self) -> int:
        return self.rank_bytes // (TURNS * PROMPTS) // self.page_bytes

    @property
    def turn_pages(self) -> int:
        return self.prompt_pages * PROMPTS

    @property
    def turn_bytes(self) -> int:
        """The bytes that one rank moves in one repetition of the measurement."""
        return self.turn_pages * self.page_bytes

    @property
    def layout(self) -> PageLayout:
        """A page layout in which each rank's share of a page has `page_bytes` bytes."""
        units = self.page_bytes // _UNIT_BYTES
        layers = next(each for each in range(LAYERS_MAX, 0, -1) if not units % each)
        heads = units // layers * self.ranks
        columns = tuple(
            Column(name=name, layers=layers, heads=heads, elements=_ELEMENTS) for name in "kv"
        )
        return PageLayout(page_tokens=PAGE_TOKENS, columns=columns)

    @property
    def threads(self) -> int:
        """The number of threads for bare system calls on each rank, equal to the store's threads."""
        uri = self.uri
        option, default = _THREAD_OPTIONS.get(uri.scheme, ("", THREADS))
        return int(uri.options.get(option, default))

    @property
    def direct(self) -> bool:
        """Whether the store bypasses the page cache. If so, the bare system calls bypass it, too."""
        return self.uri.scheme == "file" and self.uri.options.get("direct") == "1"

    @property
    def limit_directory(self) -> Path:
        """The directory for files that bare system calls write.

        It is on the store's filesystem if the store has one, and otherwise in memory.
        """
        return limit_directory(self.uri)

    @property
    def in_directory(self) -> bool:
        """Whether the store keeps its pages in files, which bare system calls can then read."""
        return self.uri.scheme in IN_DIRECTORIES

    @property
    def files_of_its_own(self) -> bool:
        """Whether the store has one file per KV page."""
        return self.uri.scheme == "file"

    @property
    def slots(self) -> bool:
        """Whether the store keeps KV pages in slots of large files."""
        return self.uri.scheme == "3fs"

    @property
    def slot_bytes(self) -> int:
        """The size in bytes of a slot, which holds one KV page, in a store with slot files."""
        return self.uri.read(ThreeFsOptions).slot_bytes or SLOT_BYTES
