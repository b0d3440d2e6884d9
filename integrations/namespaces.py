"""Forms namespaces, which separate requests that have equal tokens but different KV.

All engines must form namespaces in the same way, because pages are shared only within a namespace.
"""

import json
from collections.abc import Mapping

SALT = "salt"
ADAPTER = "adapter"


def namespace_of_parts(parts: Mapping[str, object]) -> str:
    """Return the namespace that consists of these named parts; empty parts are left out.

    Engines that share pages must use the same part names, such as those of a tenant's salt and of an
    adapter's identity.
    """
    kept = {name: part for name, part in parts.items() if part}
    return json.dumps(kept, sort_keys=True) if kept else ""
