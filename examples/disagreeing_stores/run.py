"""Run two ranks of vLLM with separate stores, after one of the stores has lost a page.

Runs the case with a naive connector, with Lockstep, and without a connector, and prints the tokens of
each run. All files are in a temporary folder.

With the naive connector the ranks find different cached lengths, so they compute different numbers of
tokens. Then an all_reduce adds mismatched tensors, or gloo aborts a rank that receives more than its
buffer holds.

Exit status 0: Lockstep gave the right tokens, and the naive connector gave wrong ones or crashed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import tiny_llama

HERE = Path(__file__).parent
RANKS = 2
SPOILED_RANK = 1
WIDTH = 92
"""Width in columns to which the printed text is wrapped, to fit a code block of the documentation site.
"""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The output tokens and cached lengths of each rank in one run, and Lockstep's log lines."""

    tokens: list[list[int]]
    cached: list[int]
    lines: list[str]
    ended: str = ""
    """The error if the ranks crashed; empty otherwise."""


def serve(folder: Path, connector: str, name: str, *, may_end: bool = False) -> Answer:
    """Run both ranks on one prompt; return the result.

    If the ranks crash, the result has the error if `may_end` is true; otherwise this program exits.
    """
    print(f"  {name} ...", flush=True)
    command = [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
        *(str(HERE / "serve.py"), connector, name),
    ]
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = finished.stdout + finished.stderr
    if finished.returncode and may_end:
        whys = [line for line in output.splitlines() if "Error" in line and "[rank" in line]
        return Answer([], [], [], whys[-1].strip() if whys else f"status {finished.returncode}")
    if finished.returncode:
        sys.exit(f"the ranks ended with status {finished.returncode}:\n{output[-4000:]}")
    answers = [
        json.loads((folder / f"{name}.rank{each}.json").read_text()) for each in range(RANKS)
    ]
    return Answer(
        [answer["tokens"] for answer in answers],
        [answer["cached"] for answer in answers],
        re.findall(r"rank \d+ lacks page.*", output),
    )


def lose_a_page(store: Path) -> None:
    """Remove one page of the prompt from the store of one rank.

    Removes the third newest file by mtime. That is usually the third page from the end; it can be
    another page if several files have the same mtime.
    """
    files = [path for path in (store / f"rank{SPOILED_RANK}").rglob("*") if path.is_file()]
    sorted(files, key=lambda path: path.stat().st_mtime_ns)[-3].unlink()


def main() -> int:
    """Run the naive connector, Lockstep and no connector, and print the results."""
    with tempfile.TemporaryDirectory(prefix="disagreeing-stores-") as name:
        folder = Path(name)
        tiny_llama.make(folder / "model")
        print("Starting vLLM five times, on two ranks each:")
        right = serve(folder, "none", "without a connector")
        found: dict[str, Answer] = {}
        for connector in ("naive", "lockstep"):
            serve(folder, connector, f"{connector}, empty stores")
            lose_a_page(folder / "stores" / connector)
            found[connector] = serve(
                folder,
                connector,
                f"{connector}, rank 1 has lost a page",
                may_end=connector == "naive",
            )
    print()
    _print_row("without a connector", right, right)
    for connector, answer in found.items():
        _print_row(f"{connector}, one page lost", answer, right)
    good = found["lockstep"].tokens == right.tokens and found["naive"].tokens != right.tokens
    return 0 if good else 1


def _print_row(name: str, answer: Answer, right: Answer) -> None:
    if answer.ended:
        for rank in range(RANKS):
            print(f"{name:23} rank {rank}: WRONG, its ranks ended: {answer.ended}")
    verdict = "right" if answer.tokens == right.tokens else "WRONG"
    for rank, tokens in enumerate(answer.tokens):
        print(f"{name:23} rank {rank}: {verdict} {answer.cached[rank]:4} cached  {tokens}")
    for line in answer.lines:
        print(textwrap.fill(line, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4))


if __name__ == "__main__":
    sys.exit(main())
