"""What keeps apart requests of the same tokens and of other KV: one text for every engine."""

import json
from collections.abc import Mapping

SALT = "salt"
ADAPTER = "adapter"


def namespace_of_parts(parts: Mapping[str, object]) -> str:
    """Return the namespace of requests with these parts, of which those that are empty do not count.

    Engines that share pages give a part one name: a tenant's salt, what an adapter's weights are.
    """
    kept = {name: part for name, part in parts.items() if part}
    return json.dumps(kept, sort_keys=True) if kept else ""
