"""What a model's KV is, apart from the tokens: part of the key of every page (rule R16).

The weights, by what their files hold, by their commit, or by a version that the user gives; and a
digest of all that the model is configured with and that is not proven to change no byte of KV. Which
of several sets of files was loaded, and in which types, the model does not say; so the content of its
norms is part of the one, and the types of all parameters of the other.
"""

import logging
from hashlib import sha256
from typing import TYPE_CHECKING, cast

import torch

from ...errors import ConfigError
from ..canonical import DIGEST_CHARACTERS, Json, canonical, digest, log_parts
from ..model_weights import LoadedWeights, remedy
from ..weights import FileDigests
from .key_exclusions import LEFT_OUT
from .settings import WHERE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("lockstep.transformers")

Signature = tuple[tuple[str, int, int, int], ...]
"""For each parameter its name, its object, where its memory is and how often it was written."""


def configuration_digest(model: "PreTrainedModel", version: str) -> str:
    """Return a digest of what a model is, less what changes no byte of KV and what its files hold.

    `version` is that of Transformers, whose code computes. Raises `ConfigError` for a value of the
    configuration that has no canonical bytes.
    """
    found = canonical(model.config, "model.config", LEFT_OUT)
    # Behind the words for an object and its class are its parts, by name.
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
    """Return what a model's weights are.

    The user's `version`, if there is one, stands for them, and nothing is read. Raises `ConfigError`,
    which says what to do, where they cannot be told.
    """
    require_no_adapter(model)
    if version is not None:
        return f"version {version}"
    config = model.config
    name = config._name_or_path  # noqa: SLF001 - there is no other word of where they come from.
    if not name:
        raise ConfigError(
            f"the model was not loaded by from_pretrained, so its weights are unknown; {remedy(WHERE)}"
        )
    revision = getattr(config, "_commit_hash", None)
    loaded = LoadedWeights(name, revision, "from_pretrained", True).identity(digests, WHERE)
    return f"{loaded}, norms {_norms(model)}"


def _norms(model: "PreTrainedModel") -> str:
    """Return a digest of what the model's norms hold, which every rank has whole."""
    found = sha256()
    for name, each in model.named_parameters():
        if name.endswith("norm.weight") and type(each) is torch.nn.Parameter:
            content = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(name.encode() + content.numpy().tobytes())
    return found.hexdigest()[:DIGEST_CHARACTERS]


def signature(model: "PreTrainedModel") -> Signature:
    """Return what changes when a model's parameters do; it is not the same in another process."""
    require_no_adapter(model)
    return tuple(
        (name, id(each), each.data_ptr(), 0 if each.is_inference() else each._version)  # noqa: SLF001
        for name, each in model.named_parameters()
    )


def require_no_adapter(model: "PreTrainedModel") -> None:
    """Raise `ConfigError` for a model with adapters, which can be switched without a trace."""
    if getattr(model, "peft_config", None):
        raise ConfigError(
            "the model has adapters, which can be switched from request to request and are in no"
            f" page's key; merge them into the weights (merge_and_unload), and {remedy(WHERE)}"
        )
