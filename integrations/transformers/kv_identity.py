"""Identity of a Transformers model's KV apart from the tokens; part of every page's key (rule R16).

It consists of the identity of the weights, and a digest of the configuration without fields that cannot
change KV. A loaded model does not record from which of several weight files, and in which dtypes, it
was loaded. The identity therefore also covers the values of the norm weights and the dtypes of all
parameters.
"""

import logging
from hashlib import sha256
from typing import TYPE_CHECKING, cast

import torch

from ...errors import ConfigError
from ..canonical import DIGEST_CHARACTERS, Json, canonical, digest, log_parts
from ..model_weights import LoadedWeights, remedy
from ..weights import FileDigests
from .generate_settings import WHERE
from .key_exclusions import LEFT_OUT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("lockstep.transformers")

Signature = tuple[tuple[str, int, int, int], ...]
"""(name, object id, memory address, number of in-place writes) of each of a model's parameters."""


def configuration_digest(model: "PreTrainedModel", version: str) -> str:
    """Return a digest of a model's class and configuration, without fields that do not change KV.

    `version` is the version of Transformers. Raises `ConfigError` for a value without canonical bytes.
    """
    found = canonical(model.config, "model.config", LEFT_OUT)
    # Skip the first two entries of the canonical list, which are the word `object` and the class name.
    parts = cast("list[tuple[str, Json]]", cast("list[Json]", found)[2:])
    log_parts(log, ((f"model.config.{name}", part) for name, part in parts))
    types = [[name, str(each.dtype)] for name, each in model.named_parameters()]
    kind = type(model)
    return digest(
        [
            f"{kind.__module__}.{kind.__qualname__} of transformers {version}",
            f"float32 products {torch.get_float32_matmul_precision()}",
            found,
            canonical(types, "types"),
        ]
    )


def weights_of(model: "PreTrainedModel", version: str | None, digests: FileDigests) -> str:
    """Return the identity of a model's weights.

    A user-given `version` replaces the digest, and no file is read. Raises `ConfigError` with a remedy
    if the weights cannot be identified.
    """
    require_no_adapter(model)
    if version is not None:
        return f"version {version}"
    config = model.config
    name = config._name_or_path  # noqa: SLF001 - the only record of their origin.
    if not name:
        raise ConfigError(
            f"the model was not loaded by from_pretrained, so its weights are unknown; {remedy(WHERE)}"
        )
    revision = getattr(config, "_commit_hash", None)
    loaded = LoadedWeights(name, revision, "from_pretrained", True).identity(digests, WHERE)
    return f"{loaded}, norms {_norms(model)}"


def _norms(model: "PreTrainedModel") -> str:
    """Return a digest of a model's norm weights, which, unlike most weights, each rank has whole."""
    found = sha256()
    for name, each in model.named_parameters():
        if name.endswith("norm.weight") and type(each) is torch.nn.Parameter:
            content = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(name.encode() + content.numpy().tobytes())
    return found.hexdigest()[:DIGEST_CHARACTERS]


def signature(model: "PreTrainedModel") -> Signature:
    """Return a value that changes when the model's parameters change; valid only in this process."""
    require_no_adapter(model)
    return tuple(
        (name, id(each), each.data_ptr(), 0 if each.is_inference() else each._version)  # noqa: SLF001
        for name, each in model.named_parameters()
    )


def require_no_adapter(model: "PreTrainedModel") -> None:
    """Raise `ConfigError` if a model has adapters: Lockstep cannot detect a switch between them."""
    if getattr(model, "peft_config", None):
        raise ConfigError(
            "the model has adapters, which can be switched from request to request and are in no"
            f" page's key; merge them into the weights (merge_and_unload), and {remedy(WHERE)}"
        )
