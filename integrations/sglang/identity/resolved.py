"""What an SGLang engine is configured with, as it came out: imported only in a process of SGLang.

A user's arguments are one thing, and what the engine runs with is another: it fills in what was not
given, by the model, the device and each other, and changes more while it starts. What counts is what
came of it, which SGLang holds by namespaces.
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
    """Return what this process's engine is configured with, as of now.

    Called where a radix cache is made, by which time the model is loaded; `model_config` is what the
    engine gives there.
    """
    context = get_context()
    arguments = type(context.server_args)
    fields: dict[str, dict[str, object]] = {}
    for name, namespace in namespace_of(arguments).items():
        fields.setdefault(namespace, {})[name] = context.config_leaf(name)
    return Resolved(engine_version, fields, model_config, environment(), declared(arguments))


def declared(arguments: Callable[..., object]) -> dict[str, object]:
    """Return what SGLang has for each of its arguments that is not given, by name."""
    # Nothing is resolved, or looked for, before an engine is started with them.
    blank = arguments(model_path="")
    return {
        name: with_fallback(arguments, name, getattr(blank, name))
        for name in namespace_of(arguments)
    }


def environment() -> dict[str, object]:
    """Return the variables that are set to another value than their default, as SGLang reads them."""
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
