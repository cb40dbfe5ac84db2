"""Peak memory of the loss at 8,192 tokens and 152 thousand token types: envgym's loss, and one with all logits.

    .venv/bin/python benchmarks/learner_memory.py [--tokens 8192] [--vocabulary 151936] [--repeats 3]

The loss computes the log-probabilities of all tokens from their hidden states and the output layer, with the entropies
that training logs, and the gradients of both. The plain way makes the logits of all tokens, as a model's own forward
does, and takes `log_softmax` of them; envgym's is the output layer of the workers. Each side runs in a separate
process, whose peak resident memory is read; the memory of the process before the loss (libraries, hidden states,
weights) is subtracted. The sides alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

SIDES = {"full": "all logits at once", "ours": "envgym"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936, help="Qwen3's")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measured(options.side, options.tokens, options.hidden_size, options.vocabulary)))
        return
    where = conditions(["envgym", "torch"])
    turns = [{side: run(side, options) for side in SIDES} for _ in range(options.repeats)]
    for turn in turns:
        assert abs(turn["ours"]["loss"] / turn["full"]["loss"] - 1) < 1e-5, "the sides compute different losses"
    ratios = sorted(turn["ours"]["peak"] / turn["full"]["peak"] for turn in turns)
    result: dict[str, Any] = {
        "conditions": where,
        "job": {name: getattr(options, name) for name in ("tokens", "vocabulary", "hidden_size", "repeats")},
        "logits_bytes": 4 * options.tokens * options.vocabulary,
        "sides": {
            side: {name: median(turn[side][name] for turn in turns) for name in ("peak", "seconds")} for side in SIDES
        },
        "ratio": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
    }
    publish("learner_memory", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    job, ratio = result["job"], result["ratio"]
    rows = [
        [SIDES[name], f"{side['peak'] / 2**30:.2f}", f"{side['seconds']:.1f}"] for name, side in result["sides"].items()
    ]
    what = (
        f"envgym needs {ratio['median']:.3f} of the memory ({ratio['least']:.3f} to {ratio['greatest']:.3f} in "
        f"{job['repeats']} turns): {job['tokens']:,} tokens, {job['vocabulary']:,} words, hidden size "
        f"{job['hidden_size']}, float32; the logits alone would be {result['logits_bytes'] / 2**30:.2f} GiB. "
    )
    header = ["the loss by", "peak above what was there before, GiB", "forward and backward, s"]
    return f"{table(header, rows)}\n\n{what}{conditions_in_words(result['conditions'])}"


def run(side: str, options: argparse.Namespace) -> dict[str, float]:
    """The result of `measured`, from a separate process."""
    command = [sys.executable, __file__, "--side", side]
    for name in ("tokens", "vocabulary", "hidden_size"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measured(side: str, tokens: int, hidden_size: int, vocabulary: int) -> dict[str, float]:
    """The loss of `side`, bytes of memory at its peak above those before it, and wall-clock seconds."""
    import time

    import torch
    from torch import nn

    from envgym.workers.head import LogprobHead, Rescaling

    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    head = nn.Linear(hidden_size, vocabulary, bias=False)
    targets = torch.randint(vocabulary, (tokens,))
    # What torch sets up at its first product is no part of the loss.
    nn.functional.linear(hidden[:64], head.weight[:64]).sum().backward()
    hidden.grad = head.weight.grad = None

    before, began = peak_rss(), time.perf_counter()
    assert before < 1.2 * current_rss() + 2**26, "something before the loss needed more than is held now"
    if side == "full":
        logs = head(hidden).log_softmax(1)
        logprobs = logs.gather(1, targets[:, None])
        with torch.no_grad():
            (logs.exp() * logs).sum(1)
    else:
        scoring = LogprobHead.convert(head, Rescaling())
        logprobs, _ = scoring(hidden, targets, torch.ones(tokens), True, False)
    loss = -logprobs.mean()
    loss.backward()
    return {"loss": loss.item(), "peak": peak_rss() - before, "seconds": time.perf_counter() - began}


def peak_rss() -> int:
    """Peak memory of this process so far, in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def current_rss() -> int:
    """Current memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
