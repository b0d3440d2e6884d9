"""One process of a sweep: settings and sizes come in as lines of JSON, points go out as such.

Started by `workers`. It ends when its input does.
"""

import json
import sys

from ..cli.interruption import end_on_signals
from .evaluation import Evaluation
from .settings import PlanSettings, Size


def main() -> None:
    """Answer each line with a point."""
    end_on_signals()
    evaluation = Evaluation(PlanSettings(**json.loads(sys.stdin.readline())))
    for line in sys.stdin:
        print(json.dumps(evaluation.evaluate(Size(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
