"""What the first machine with a GPU must answer, in steps that run one at a time; each prints ok, FAILED or skipped.

    python benchmarks/gpu_first.py                    # every step, the cheap ones first
    python benchmarks/gpu_first.py placement turns    # these
    python benchmarks/gpu_first.py --toy              # toy sizes, also on a CPU

A step is a process of its own. Its results go into `benchmarks/results/gpu_first.json` (`gpu_first_toy.json`), beside
those of steps that ran earlier, before the next one begins. What this machine lacks (a torch that vLLM's wheel accepts,
a second GPU) is said, and the other steps run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from gpu_deepspeed import make_rows
from gpu_main_job import ENVGYM, SIZES, WAYS
from gpu_main_job import make_model as make_policy
from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table
from shared_prefixes import Case, rows_of

SHAPES = {"full": SIZES["0.5B"], "turns": SIZES["30M"], "toy": (64, 2, 128, 2, 1)}
"""Shapes of policies by size; their vocabulary has 151,936 tokens."""
NOISE = 5e-3
"""Largest relative difference of two losses on a GPU, whose sums have no fixed order."""
BUDGETS = {"full": (4096, 16384, 32768), "toy": (256,)}
REWARD = """import envgym

@envgym.reward(tasks=[{"question": f"Say {number}."} for number in range(64)])
def parity(action):
    return sum(token % 2 for token in action.token_ids) / max(1, len(action.token_ids))
"""
"""A reward that differs between the samples of a random policy, most of whose tokens have no text."""
SECONDS = 1200
"""Time limit of a step."""
PAGE = ROOT / "docs" / "scale" / "gpu_walkthrough.md"


class Skipped(Exception):
    """This machine lacks something that the step needs."""


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if gpus() else "no GPU"


def placement(size: str) -> dict[str, Any]:
    """The plan and torch count the same GPUs, and both know their memory."""
    import torch

    from envgym.placement.plan import this_machine

    machine, count = this_machine(), gpus()
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    total = [torch.cuda.mem_get_info(number)[1] for number in range(count)]
    assert machine.gpus == count, f"the plan counts {machine.gpus} GPUs, torch {count}"
    if machine.gpu_bytes is not None:
        assert abs(min(total) / machine.gpu_bytes - 1) < 0.05, (
            f"the plan knows {machine.gpu_bytes} bytes, torch {total}"
        )
    return {"gpus": names, "bytes": total, "torch": torch.__version__, "cuda": torch.version.cuda}


def turns(size: str) -> dict[str, Any]:
    """A model that leaves the device between steps learns exactly what one that stays does, and its weights move."""
    losses: dict[str, list[float]] = {}
    left: dict[str, float] = {}
    with policy("toy" if size == "toy" else "turns") as model:
        for dtype, stage, lora, offload in product(("bfloat16", "float32"), range(4), (0, 4), (False, True)):
            if offload and (lora or not stage):
                continue
            name = f"{dtype}, stage {stage}{', LoRA' if lora else ''}{', offload' if offload else ''}"
            settings = {"zero_stage": stage, "offload_optimizer": offload, "dtype": dtype}
            (expected, _), (observed, left[name]) = (
                _three_steps(size, model, settings, lora, in_turns=in_turns) for in_turns in (False, True)
            )
            difference = max(abs(a / b - 1) for a, b in zip(observed, expected, strict=True))
            assert difference <= (NOISE if gpus() else 0.0), f"{name}: losses {observed} with turns, {expected} without"
            losses[name] = observed
    return {"losses": losses, "gib_left_on_the_device": left}


def _three_steps(
    size: str, model: str, settings: dict[str, Any], lora: int, *, in_turns: bool
) -> tuple[list[float], float]:
    """The losses, and GiB of the device that were allocated at most while everything was off it."""
    import torch

    from envgym.learner import RoleSpec
    from envgym.types import Objective
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.lora import LoraConfig
    from envgym.workers.model import ModelWorker

    torch.manual_seed(0)
    losses, left = [], 0.0
    learner = {"name": "sft", "lr": 1e-3}
    workers, adapter = WorkersConfig(**settings), LoraConfig(rank=lora)
    worker = ModelWorker(WorkerSpec("actor", model, RoleSpec(trained=True), learner, workers, adapter))
    worker.load()
    first = {name: tensor.float().cpu().clone() for name, tensor in worker._parameters(worker.dtype)}
    for step in range(3):
        rows = make_rows(8, 64 if size == "toy" else 512, step)
        total = sum(float(row.loss_weights.sum()) for row in rows)
        logged = worker.accumulate([rows], {Objective.CROSS_ENTROPY: total})
        worker.step(1e-3)
        losses.append(logged["loss"][0] / logged["loss"][1])
        if in_turns:
            worker.offload(True)
            worker.offload(False)
            left = max(left, torch.cuda.memory_allocated() / 2**30 if gpus() else 0.0)
            worker.onload()
    last = {name: tensor.float().cpu() for name, tensor in worker._parameters(worker.dtype)}
    moved = sum(not torch.equal(tensor, last[name]) for name, tensor in first.items())
    assert moved > len(first) / 3, f"{moved} of {len(first)} parameters moved"
    worker.close()
    return losses, left


@contextmanager
def policy(shape: str) -> Iterator[str]:
    """The folder of a policy with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        yield make_policy(Path(folder), *SHAPES[shape])


def deepspeed(size: str) -> dict[str, Any]:
    """Stages, offload and compilation train to the same losses (`gpu_deepspeed.py`)."""
    sizes = ["--layers", "1", "--width", "64", "--steps", "2", "--rows", "4", "--length", "32"] if size == "toy" else []
    cases = "zero1,zero2,zero3,checkpointing,offload_optimizer_zero2,offload_all,compile_zero3,average"
    _script("gpu_deepspeed.py", "--cases", cases, *sizes)
    stored = json.loads((RESULTS / "gpu_deepspeed.json").read_text())["cases"]
    losses = {name: case["loss"] for name, case in stored.items() if "loss" in case}
    for name, loss in losses.items():
        assert max(abs(a / b - 1) for a, b in zip(loss, losses["zero1"], strict=True)) < 0.02, f"{name}: {loss}"
    return {name: case.get("refused") or case["tokens_per_second"] for name, case in stored.items()}


def loop_transformers(size: str) -> dict[str, Any]:
    """The whole loop on one GPU without vLLM, at the same time and in turns; the weights move."""
    with policy(size) as model:
        return {way: _loop(size, model, "engine.kind=transformers", f"colocate={way}") for way in ("auto", "all")}


def loop_vllm(size: str) -> dict[str, Any]:
    """The whole loop with vLLM, for every weight transfer that this machine has."""
    _need_vllm()
    ways = ("files", "turns") if gpus() < 2 else ("files", "nccl", "cuda_ipc", "turns", "turns_cuda_ipc", "beside")
    with policy(size) as model:
        return {way: _loop(size, model, *WAYS[way]) for way in ways}


def ipc(size: str) -> dict[str, Any]:
    """Weights of a vocabulary of 151,936 go to vLLM by CUDA's handles, in turns on one GPU."""
    if not gpus():
        raise Skipped("no GPU")
    _need_vllm()
    with policy(size) as model:
        return _loop(size, model, *WAYS["turns_cuda_ipc"])


def _loop(size: str, model: str, *words: str) -> dict[str, Any]:
    """Three steps of a policy with random weights: seconds of each phase, and the probe's largest difference."""
    import torch
    from safetensors.torch import load_file

    tokens, tasks = (8, 4) if size == "toy" else (128, 32)
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"rollout.tasks_per_step={tasks}", "rollout.group_size=4", f"rollout.max_tokens={tokens}"]
        settings += ["eval.every=0", "checkpoint.every=0", "learner.lr=1e-4", f"runs_dir={folder}"]
        Path(folder, "parity.py").write_text(REWARD)
        command = [ENVGYM, "train", "--env", f"{folder}/parity.py", "--model", model, "--name", "run", "steps=3"]
        done = subprocess.run([*command, *settings, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            for log in Path(folder, "run", "logs").glob("*"):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            raise AssertionError(done.stderr.strip()[-500:])
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        weights = [load_file(Path(path, "model.safetensors")) for path in (model, f"{folder}/run/model")]
        moved = [
            name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name].to(weights[0][name]))
        ]
    assert len(moved) > len(weights[0]) / 3, f"{len(moved)} of {len(weights[0])} parameters moved"
    last = {key: lines[-1][key] for key in ("seconds/rollout", "seconds/learn", "seconds/sync") if key in lines[-1]}
    return {**last, "probe": max(line.get("sync/max_abs", 0.0) for line in lines), "moved": len(moved)}


def speed(size: str) -> dict[str, Any]:
    """Tokens a second of learning, by tokens per micro-batch, with peak memory, beside the bound by its products."""
    import torch

    from envgym.types import Objective
    from envgym.workers.export import flops_per_token

    result: dict[str, Any] = {
        "matmul_tflops": _matmul_rate("cuda" if gpus() else "cpu", 8192 if gpus() else 512) / 1e12
    }
    with policy(size) as model:
        for budget in BUDGETS[size]:
            worker = _load_actor(model, "sft", budget)
            if gpus():
                torch.cuda.reset_peak_memory_stats()
            rows = make_rows(max(8, 4 * budget // 512), 64 if size == "toy" else 512, 0)
            batches = [rows[start : start + budget // 512 or 8] for start in range(0, len(rows), budget // 512 or 8)]
            total, n_tokens = sum(float(row.loss_weights.sum()) for row in rows), sum(map(len, rows))
            rate = n_tokens / _seconds_of_a_step(worker, batches, {Objective.CROSS_ENTROPY: total})
            constant, per_length = flops_per_token(worker.network.model)
            flops = constant + per_length * 512
            result[str(budget)] = {
                "tokens_per_second": rate,
                "share_of_matmul": rate * flops / result["matmul_tflops"] / 1e12,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpus() else 0.0,
                "attention": str(worker.network.model.config._attn_implementation),
            }
            worker.close()
    return result


def prefixes(size: str) -> dict[str, Any]:
    """Groups whose prompt is computed once: the same log-probabilities as whole sequences, and how much less time."""
    import numpy as np

    from envgym.workers.micro_batches import micro_batches

    result: dict[str, Any] = {}
    cases = [Case("", 1, 40, 8)] if size == "toy" else [Case("", 8, 512, 64), Case("", 2, 2048, 128)]
    with policy(size) as model:
        worker = _load_actor(model, "grpo", 16384)
        for case in cases:
            rows = rows_of(case, 1000)
            normalizers = worker.learner.loss_normalizers(rows)
            seconds, logprobs = {}, {}
            for layout in ("shared", "padded"):
                [batches] = micro_batches(rows, 16384, 1, layout=layout)
                seconds[layout] = _seconds_of_a_step(worker, batches, normalizers, layout)
                worker._not_shared = "" if layout == "shared" else "this side has whole sequences"
                logprobs[layout] = np.concatenate([row[case.prompt :] for row in worker.forward(rows)])
            worker._not_shared = ""
            difference = np.abs(logprobs["shared"] - logprobs["padded"])
            result[f"{case.groups} x ({case.prompt} + {case.size} x {case.answer})"] = {
                "padded_over_shared": seconds["padded"] / seconds["shared"],
                "mean_difference": float(difference.mean()),
                "largest_difference": float(difference.max()),
            }
            assert difference.mean() < (0.02 if gpus() else 1e-5), f"log-probabilities differ by {difference.mean()}"
        worker.close()
    return result


def _load_actor(model: str, learner: str, budget: int) -> Any:
    from envgym.learner import RoleSpec
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.model import ModelWorker

    settings = WorkersConfig(tokens_per_microbatch=budget)
    worker = ModelWorker(WorkerSpec("actor", model, RoleSpec(trained=True), {"name": learner, "lr": 1e-5}, settings))
    worker.load()
    return worker


def _seconds_of_a_step(worker: Any, batches: Any, *words: Any) -> float:
    """The least of three optimizer steps over `batches`, after one that is not counted."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        worker.accumulate(batches, *words)
        worker.step(0.0)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _matmul_rate(device: str, width: int) -> float:
    """Floating-point operations a second of a product of two square matrices."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            product_of = left @ right
        float(product_of[0, 0])  # waits for the device
        best = max(best, 10 * 2 * width**3 / (time.perf_counter() - start))
    return best


def generation(size: str) -> dict[str, Any]:
    """Sampling in a run over vLLM alone (`gpu_main_job.py`)."""
    _need_vllm()
    if not gpus():
        raise Skipped("no GPU")
    _script("gpu_main_job.py", "--ways", "files,turns", "--steps", "6")
    stored = json.loads((RESULTS / "gpu_main_job.json").read_text())
    bare = stored["bare_tokens_per_second"]
    return {row["way"]: row.get("problem") or row["rate"] / bare for row in stored["rows"]} | {"bare": bare}


def _need_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"vLLM cannot be imported ({done.stderr.strip().splitlines()[-1][:200]})")


def _script(name: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr.strip()[-500:]


STEPS: dict[str, Callable[[str], dict[str, Any]]] = {
    step.__name__: step
    for step in (placement, turns, speed, prefixes, loop_transformers, deepspeed, loop_vllm, ipc, generation)
}


def run_step(name: str, size: str) -> dict[str, Any]:
    """Run a step in this process: its verdict, its figures or the reason, and its seconds."""
    start = time.perf_counter()
    try:
        result: dict[str, Any] = {"verdict": "ok", "figures": STEPS[name](size)}
    except Skipped as reason:
        result = {"verdict": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"verdict": "FAILED", "reason": f"{type(error).__name__}: {error}"[:1000]}
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def results(names: list[str], size: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run steps as processes of their own."""
    for name in names:
        own = [sys.executable, __file__, name, "--inside", *(["--toy"] if size == "toy" else [])]
        try:
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
            yield name, json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            yield name, {"verdict": "FAILED", "reason": f"the process ended or hung: {error}"[:500]}


def markdown(steps: dict[str, dict[str, Any]]) -> str:
    """The stored results as the text of the docs."""
    rows = []
    for name, step in STEPS.items():
        result = steps.get(name, {"verdict": "not run", "figures": {}})
        figures = result.get("figures")
        rows.append(
            [name, summary(step), result["verdict"], phrase(name, figures) if figures else result.get("reason", "")]
        )
    text = table(["step", "what it shows", "result", "measured"], rows)
    if speeds := {key: value for key, value in steps.get("speed", {}).get("figures", {}).items() if key.isdigit()}:
        lines = [
            [
                f"{int(budget):,}",
                f"{speed['tokens_per_second']:,.0f}",
                f"{speed['share_of_matmul']:.1%}",
                f"{speed['peak_gib']:.1f} GiB",
            ]
            for budget, speed in speeds.items()
        ]
        head = ["tokens per micro-batch", "tokens/s of learning", "of the matrix products' rate", "peak memory"]
        text += f"\n\n{table(head, lines)}"
    notes = "".join(f" {name}: {result['note']}." for name, result in steps.items() if "note" in result)
    where = next(iter(steps.values()))["conditions"]
    return f"{text}\n\n{where['gpu']}. {conditions_in_words(where)}{notes}"


def summary(step: Callable[[str], Any]) -> str:
    """The first line of a step's docstring."""
    return (step.__doc__ or "").splitlines()[0].rstrip(".")


def phrase(name: str, figures: dict[str, Any]) -> str:
    """A step's figures in words."""
    if name == "placement":
        return f"{len(figures['gpus'])} GPU of {figures['bytes'][0] / 2**30:.0f} GiB"
    if name == "turns":
        return "; ".join(figures["losses"])
    if name == "speed":
        return "below"
    if name == "prefixes":
        return "; ".join(f"{case}: {row['padded_over_shared']:.2f} times less" for case, row in figures.items())
    if name.startswith("loop"):
        return "; ".join(
            f"`{way}`: rollout {row['seconds/rollout']:.1f} s, learn {row['seconds/learn']:.1f} s, sync "
            f"{row['seconds/sync']:.1f} s, probe {row['probe']:.2g}"
            for way, row in figures.items()
        )
    return json.dumps(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", choices=[[], *STEPS], default=[])
    parser.add_argument("--toy", action="store_true", help="toy sizes")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = "toy" if options.toy else "full"
    if options.inside:
        print(json.dumps(run_step(options.steps[0], size)))
        return
    item = "gpu_first" if size == "full" else "gpu_first_toy"
    path = RESULTS / f"{item}.json"
    steps = json.loads(path.read_text())["steps"] if path.exists() else {}
    where, failed = conditions(["torch", "vllm", "deepspeed", "transformers"]), False
    where["gpu"] = gpu_name()
    for name, result in results(options.steps or list(STEPS), size):
        steps[name] = {**result, "size": size, "conditions": where}
        store(item, {"steps": steps})
        failed |= result["verdict"] == "FAILED"
        print(
            f"{result['verdict']:8} {name}: {json.dumps(result.get('figures') or result.get('reason'))[:600]}",
            flush=True,
        )
    if size == "full":
        fill_docs("gpu_first", markdown(steps), PAGE)
    print(f"stored in {path}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
