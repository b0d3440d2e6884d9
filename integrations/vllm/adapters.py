"""What vLLM's adapters are: their weights, by what their files hold or by the user's word."""

import logging
from collections.abc import Mapping

from ..adapters import AdapterWeights, LoadedAdapter
from ..weights import FileDigests
from .contract import LoraRequest
from .settings import WHERE

NOT_KNOWN = (
    "not known on this rank, which could not read its files or found them changed, and names it in its"
    " log; a version in adapter_versions avoids reading"
)
"""What the flight recorder says of an adapter whose weights one rank cannot tell."""


def adapter_weights(
    digests: FileDigests, versions: Mapping[str, str], options: str = ""
) -> AdapterWeights:
    """Return what tells adapters apart.

    `options` stands for all that the engine is told of adapters; see `adapter_options`.
    """
    return AdapterWeights(
        digests,
        versions,
        engine=f"vLLM {options}".rstrip(),
        where=WHERE,
        anew="give weights that change another name and id",
        log=logging.getLogger(__name__),
    )


def loaded(adapter: LoraRequest) -> LoadedAdapter:
    """Return an adapter as vLLM has it: loaded under its id, and its KV under its name."""
    return LoadedAdapter(
        adapter.lora_name,
        adapter.lora_path,
        (adapter.lora_name, adapter.lora_int_id),
        # The same files are read in two ways.
        " 3d" if adapter.is_3d_lora_weight else "",
    )
