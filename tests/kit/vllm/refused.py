"""Creates vLLM's configuration from each set of arguments in a file, and prints the errors.

This is a separate program because vLLM changes how a process logs. Arguments: the model, and a file
with a JSON list of engine arguments. The output is a JSON list with the last line of each traceback, or
an empty text if there was no error.
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
            # Choose the executor class as every vLLM engine does next, because this can also raise an
            # error.
            Executor.get_class(config)
        except Exception as error:  # noqa: BLE001 - whatever it is, is printed.
            ends.append(traceback.format_exception(error)[-1].strip())
        else:
            ends.append("")
    print(json.dumps(ends))  # noqa: T201 - the test reads it.


if __name__ == "__main__":
    main()
