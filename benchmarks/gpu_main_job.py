"""The main job on this machine's GPUs with every placement and weight transfer: seconds by phase, and tokens.

    python benchmarks/gpu_main_job.py [--parameters 0.5B] [--steps 12] [--ways files,nccl,cuda_ipc,turns]

A model with random weights trains on `math_verify`; completions have `--max-tokens` tokens, because a random model
never ends one. The tokens per second of vLLM alone are listed with each run, for the same prompts, at the same length,
in one batch. A placement or transfer that this machine does not support is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, store, table

ENVGYM = Path(sys.executable).with_name("envgym")
SIZES = {"0.5B": (896, 24, 4864, 14, 2), "30M": (512, 8, 1536, 8, 4)}
"""Width, layers, feed-forward width, heads, key-value heads: Qwen2.5's half billion, and a small one to try."""
WAYS: dict[str, list[str]] = {
    "files": ["colocate=auto"],
    "nccl": ["colocate=auto", "sync.transfer=nccl"],
    "cuda_ipc": ["colocate=auto", "sync.transfer=cuda_ipc"],
    "turns": ["colocate=all"],
    "turns_cuda_ipc": ["colocate=all", "sync.transfer=cuda_ipc"],
    "beside": ["colocate=auto", "rollout.max_staleness=1"],
}
PHASES = ("rollout", "score", "prepare", "learn", "sync")
WARMUP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", choices=list(SIZES), default="0.5B")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        print(json.dumps(bare(options.bare, options.tasks * 8, options.max_tokens)))
        return
    where = conditions(["envgym", "torch", "vllm", "deepspeed"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"), *SIZES[options.parameters])
        own = [sys.executable, __file__, "--bare", model, "--tasks", str(options.tasks)]
        alone = subprocess.run(
            [*own, "--max-tokens", str(options.max_tokens)], capture_output=True, text=True, check=True
        )
        bare_rate = json.loads(alone.stdout.splitlines()[-1])
        for way in options.ways.split(","):
            rows.append({"way": way, **run(Path(folder), model, way, options)})
            print(rows[-1], flush=True)
    job = {name: getattr(options, name) for name in ("parameters", "steps", "max_tokens", "tasks")}
    result = {"conditions": where, "job": job, "bare_tokens_per_second": bare_rate, "rows": rows}
    path = store("gpu_main_job", result)
    head = ["way", *(f"{phase}, s" for phase in PHASES), "tokens/s of rollout", "of bare vLLM"]
    lines = [
        [
            row["way"],
            *(f"{row[phase]:.2f}" for phase in PHASES),
            f"{row['rate']:,.0f}",
            f"{row['rate'] / bare_rate:.2f}",
        ]
        if "rate" in row
        else [row["way"], row["problem"], *[""] * (len(head) - 2)]
        for row in rows
    ]
    print(f"{table(head, lines)}\n\nbare vLLM {bare_rate:,.0f} tokens/s; stored in {path}")


def make_model(folder: Path, hidden: int, layers: int, inner: int, heads: int, kv_heads: int) -> str:
    """A model with random weights, and the starter's tokenizer."""
    import asyncio

    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model as of_recipe

    with open_display() as display:
        starter = asyncio.run(of_recipe("starter", display))
    tokenizer = AutoTokenizer.from_pretrained(starter)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bare(model: str, n: int, max_tokens: int) -> float:
    """Tokens per second of vLLM alone, in the second round."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, gpu_memory_utilization=0.5, skip_tokenizer_init=True, disable_log_stats=True)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": [3 + (7 * number + place) % 400 for place in range(40)]} for number in range(n)]
    rate = 0.0
    for _ in range(2):
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        rate = sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began)
    return rate


def run(folder: Path, model: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of a run's phases, in seconds, and tokens per second of rollout; or the reason why there are none."""
    words = ["train", "--env", "math_verify", "--model", model, "--name", way, f"steps={options.steps}"]
    words += ["eval.every=0", "checkpoint.every=0", f"rollout.tasks_per_step={options.tasks}", "rollout.group_size=8"]
    words += [f"rollout.max_tokens={options.max_tokens}", f"runs_dir={folder}", *WAYS[way]]
    done = subprocess.run([ENVGYM, *words], capture_output=True, text=True)
    if done.returncode:
        return {"problem": done.stderr.strip().splitlines()[-1][:200]}
    lines = (folder / way / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["step"] > WARMUP]
    phases = {phase: median(record.get(f"seconds/{phase}", 0.0) for record in records) for phase in PHASES}
    tokens = median(record["tokens/sampled"] for record in records)
    return {**phases, "rate": tokens / phases["rollout"] if phases["rollout"] else 0.0}


if __name__ == "__main__":
    main()
