"""Configures vLLM with each configuration of a file, and prints how each attempt ended.

A separate program, because vLLM changes how a process logs. Arguments: the model, and a file with a
JSON list of engine arguments. Prints a JSON list with the last line of each traceback.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.abstract import Executor

SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
}


def main() -> None:
    model, configurations = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    ends: list[str] = []
    for each in configurations:
        try:
            config = EngineArgs(model=model, **SMALL, **each).create_engine_config()
            # The first call of every vLLM engine.
            Executor.get_class(config)
        except Exception as error:  # noqa: BLE001 - whatever it is, is printed.
            ends.append(traceback.format_exception(error)[-1].strip())
        else:
            ends.append("")
    print(json.dumps(ends))  # noqa: T201 - the test reads it.


if __name__ == "__main__":
    main()
