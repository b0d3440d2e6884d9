"""What vLLM's adapters are: their weights, by what their files hold or by the user's word."""

import logging
from collections.abc import Mapping

from ..adapters import AdapterWeights, LoadedAdapter
from ..weights import FileDigests
from .contract import LoraRequest
from .settings import WHERE

_log = logging.getLogger(__name__)

ANEW = "give weights that change another name and id"

NOT_KNOWN = (
    "not known on this rank, which could not read its files or found them changed, and names it in its"
    " log; a version in adapter_versions avoids reading"
)
"""What the flight recorder says of an adapter whose weights one rank cannot tell."""


class Adapters:
    """Tells adapters apart by their weights. All calls come from the engine's thread.

    vLLM keeps an adapter that it has loaded under its id, and KV that it has computed under its name.
    """

    def __init__(
        self,
        digests: FileDigests,
        versions: Mapping[str, str],
        *,
        options: str = "",
        log: logging.Logger = _log,
    ) -> None:
        """`options` stands for all that the engine is told of adapters; see `adapter_options`."""
        engine = f"vLLM {options}".rstrip()
        self._weights = AdapterWeights(
            digests, versions, engine=engine, where=WHERE, anew=ANEW, log=log
        )

    def identify(self, adapter: LoraRequest) -> str | None:
        """Return what the weights of a request's adapter are; None: do not cache the request."""
        return self._weights.identify(_loaded(adapter))

    def trusted(self, adapter: LoraRequest | None) -> bool:
        """Say whether it is certain which weights a request's KV comes from."""
        return adapter is None or self._weights.trusted(_loaded(adapter))


def _loaded(adapter: LoraRequest) -> LoadedAdapter:
    return LoadedAdapter(
        adapter.lora_name,
        adapter.lora_path,
        (adapter.lora_name, adapter.lora_int_id),
        # The same files are read in two ways.
        " 3d" if adapter.is_3d_lora_weight else "",
    )
