"""Reads an SGLang engine's final configuration; imported only in an SGLang process.

SGLang fills in missing arguments from the model, the device and other arguments, and changes further
arguments during startup. Page keys use the final values, which SGLang keeps in sections.
"""

import os
from collections.abc import Callable

from sglang import __version__ as engine_version
from sglang.srt.arg_groups.arg_utils import namespace_of, with_fallback
from sglang.srt.environ import EnvField, envs
from sglang.srt.runtime_context import get_context

from .environment import PREFIX, READ_BESIDE
from .kv_identity import Resolved


def resolved(model_config: object) -> Resolved:
    """Return the current configuration of the SGLang engine in this process.

    Call it when SGLang creates the radix cache, because the model is loaded by then. `model_config` is
    the object that SGLang passes to the radix cache's constructor.
    """
    context = get_context()
    arguments = type(context.server_args)
    fields: dict[str, dict[str, object]] = {}
    for name, namespace in namespace_of(arguments).items():
        fields.setdefault(namespace, {})[name] = context.config_leaf(name)
    return Resolved(engine_version, fields, model_config, environment(), declared(arguments))


def declared(arguments: Callable[..., object]) -> dict[str, object]:
    """Return the default value of each SGLang argument, by name."""
    # Construct the arguments only to get their defaults: construction neither resolves arguments nor
    # reads files.
    blank = arguments(model_path="")
    return {
        name: with_fallback(arguments, name, getattr(blank, name))
        for name in namespace_of(arguments)
    }


def environment() -> dict[str, object]:
    """Return the environment variables that count as settings; values are as SGLang reads them.

    These are declared variables that differ from their defaults, and undeclared ones that SGLang may
    read.
    """
    declared = {each.name: each for each in vars(type(envs)).values() if isinstance(each, EnvField)}
    found: dict[str, object] = {
        name: value
        for name, value in os.environ.items()
        if name not in declared and (name.startswith(PREFIX) or name in READ_BESIDE.split())
    }
    for variable in declared.values():
        if variable.is_set() and (value := variable.get()) != _default(variable):
            found[variable.name] = value
    return found


def _default(variable: EnvField) -> object:
    default = variable.default
    return default() if callable(default) else default
