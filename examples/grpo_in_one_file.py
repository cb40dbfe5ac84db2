"""GRPO on one page: several answers to each question, each compared with its group; the better ones become more likely.

`VLLM_LOGGING_LEVEL=ERROR python examples/grpo_in_one_file.py` runs it with envgym's environment, renderer, engine and
worker; `envgym train --learner examples/grpo_in_one_file.py:GRPO` trains with this learner in many processes.
"""

import asyncio
import tempfile
from statistics import fmean, stdev

import envgym
from envgym.config.recipes import recipe_model_folder
from envgym.engine import Request, SamplingParams
from envgym.engines.spec import EngineSpec
from envgym.engines.vllm import VLLMEngine
from envgym.learner import Learner, RoleSpec
from envgym.render import RenderConfig, load_renderer
from envgym.types import Action, Episode, Group, Outcome, Row, Segment, int_array
from envgym.workers.config import WorkerSpec
from envgym.workers.model import ModelWorker

MODEL = str(recipe_model_folder("starter"))  # 0.4 million parameters; it ships with envgym
STEPS, TASKS, GROUP, HELD_OUT, LR = 40, 16, 8, 64, 4e-4


class GRPO(Learner):
    def prepare(self, groups):
        for group in groups:
            rewards = [episode.reward for episode in group.episodes]
            for episode in group.episodes:
                advantage = (episode.reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
                for row in episode.rows:
                    row.arrays["advantages"] = advantage * row.loss_weights  # 0 at the prompt's tokens
        return [row for group in groups for episode in group.episodes for row in episode.rows]

    def loss(self, role, outputs, batch, normalizers):
        # The weights to be updated sampled the answers, so all ratios are 1, and clipping would change nothing.
        return -(batch.arrays["advantages"] * outputs.logprobs).sum() / normalizers[batch.objective], {}


async def roll_out(spec, renderer, engine, tasks):
    async def episode(task, name):
        async with spec.make() as env:
            observation, _ = await env.reset(options={"task": task})
            prompt = int_array(renderer.prompt(observation))
            sampling = SamplingParams(max_tokens=64, stop_token_ids=renderer.stop_token_ids)
            turn = await engine.generate(Request(name, prompt, sampling))
            _, reward, *_ = await env.step(Action(renderer.text(turn.token_ids), turn.token_ids))
        row = Row([Segment("prompt", prompt), Segment("action", turn.token_ids, logprobs=turn.logprobs)])
        return Episode(name, task, Outcome.finish(), [row], reward)

    groups = [asyncio.gather(*(episode(task, f"{task.id}.{n}") for n in range(GROUP))) for task in tasks]
    return [Group(task.id, task, await group) for task, group in zip(tasks, groups, strict=True)]


async def main(steps=STEPS):
    renderer, engine = load_renderer(MODEL, RenderConfig()), VLLMEngine(EngineSpec(MODEL))
    worker = ModelWorker(WorkerSpec("actor", MODEL, RoleSpec(trained=True), learner={"name": f"{__file__}:GRPO"}))
    worker.load()
    async with envgym.spec("math_verify") as spec:
        for step in range(steps + 1):
            if step in (0, steps):
                tasks = [await spec.tasks("test").get(n) for n in range(HELD_OUT)]
                groups = await roll_out(spec, renderer, engine, tasks)
                print(f"step {step}: score {fmean(e.reward for group in groups for e in group.episodes):.2f}")
            if step == steps:
                break
            tasks = [await spec.tasks("train").get(step * TASKS + n) for n in range(TASKS)]
            rows = worker.learner.prepare(await roll_out(spec, renderer, engine, tasks))
            worker.accumulate([rows], worker.learner.loss_normalizers(rows))  # as one micro-batch
            worker.step(LR)
            await engine.begin_weights()
            with tempfile.TemporaryDirectory() as folder:
                worker.begin_export(2**25, f"{folder}/weights", checkpoint_names=True)
                loaded = [await engine.load_bucket(bucket) for bucket in iter(worker.next_bucket, None)]
            await engine.end_weights(len(loaded), step + 1)


if __name__ == "__main__":
    asyncio.run(main())
