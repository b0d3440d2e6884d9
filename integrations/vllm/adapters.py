"""Identity of vLLM's LoRA adapters in page keys: a digest of their files, or a user-given version."""

import logging
from collections.abc import Mapping

from ..adapters import AdapterWeights, LoadedAdapter
from ..weights import FileDigests
from .connector_settings import WHERE
from .contract import LoraRequest

NOT_KNOWN = (
    "not known on this rank, which could not read its files or found them changed (see its log);"
    " a version in adapter_versions avoids reading them"
)
"""Text in the flight recorder for an adapter that this rank cannot identify."""


def adapter_weights(
    digests: FileDigests, versions: Mapping[str, str], options: str = ""
) -> AdapterWeights:
    """Return the object that identifies adapters by their weights.

    `options` is a digest of the engine's adapter options; see `adapter_options`.
    """
    return AdapterWeights(
        digests,
        versions,
        engine=f"vLLM {options}".rstrip(),
        where=WHERE,
        anew="load changed weights under a new name and id",
        log=logging.getLogger(__name__),
    )


def loaded(adapter: LoraRequest) -> LoadedAdapter:
    """Return vLLM's adapter as a `LoadedAdapter`; vLLM finds the adapter by name and by id."""
    return LoadedAdapter(
        adapter.lora_name,
        adapter.lora_path,
        (adapter.lora_name, adapter.lora_int_id),
        # Add a suffix if vLLM loads the adapter as 3-D weights, because vLLM has two ways to load the
        # same files.
        " 3d" if adapter.is_3d_lora_weight else "",
    )
