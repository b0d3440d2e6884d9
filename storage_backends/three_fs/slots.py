"""The slots of one open `3fs://` store: all that its reads and its writes need to get at them."""

from dataclasses import dataclass

from ..page_index.contract import Settings
from .complaints import Complaints
from .files import SlotFiles
from .index import IndexCalls
from .transfers import Transfers


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """Where the slots are, who has them, what moves their bytes, and whom to tell of trouble."""

    files: SlotFiles
    index: IndexCalls
    transfers: Transfers
    settings: Settings
    complaints: Complaints
