"""A command of OpenRLHF's for a vision-language model and an agent file whose feedback has images, both as its newest
versions have them: two training steps on vLLM, whose prompts are those of the model's processor."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from envgym.episodes.files import read_episodes
from tests.vision_models import make_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = '''
import random
from typing import Any, Dict

import numpy as np
import torch
from PIL import Image

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MARK = "<|vision_start|><|image_pad|><|vision_end|>"


class AgentInstance(AgentInstanceBase):
    """Shows a screen after the first answer, and none after the second."""

    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.turn += 1
        text = states["action_text"]
        states["sampling_params"].max_tokens = 8
        if self.turn == 3:
            reward = torch.tensor(len(text) % 5 / 4)
            return {"rewards": reward, "scores": reward, "environment_feedback": "\\n<|im_end|>\\n", "done": True,
                    "extra_logs": {"turns": self.turn, "label": len(states["label"])}}
        screen = np.random.RandomState(random.randint(0, 10000)).randint(0, 256, (28, 56, 3), dtype=np.uint8)
        images = {"environment_images": [Image.fromarray(screen)]} if self.turn == 1 else {}
        mark = MARK if self.turn == 1 else "No screen."
        feedback = f"\\n<|im_start|>user\\n{mark}\\nAnd now?\\n<|im_end|>\\n<|im_start|>assistant\\n"
        return {"rewards": torch.tensor(0.0), "environment_feedback": feedback, "done": False, **images}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
'''
SIDES = ("left", "right")
COMMAND = """
   --actor.num_nodes 1 --actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.tensor_parallel_size 1
   --train.colocate_all --vllm.gpu_memory_utilization 0.7 --algo.kl.init_coef 0 --algo.advantage.gamma 1.0
   --algo.kl.use_loss --algo.kl.estimator k2 --algo.advantage.estimator reinforce_baseline
   --actor.model_name_or_path model --train.agent_func_path agent.py --ckpt.output_dir saved --ckpt.path kept/run
   --ckpt.save_hf --ckpt.save_steps 5 --eval.steps -1 --train.micro_batch_size 1 --rollout.micro_batch_size 1
   --train.batch_size 16 --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --train.num_episodes 1
   --data.max_len 384 --rollout.max_new_tokens 8 --ds.param_dtype bf16 --actor.adam.lr 2e-4
   --data.prompt_dataset rows.jsonl --data.input_key prompt --data.label_key label --data.image_key screens
   --data.max_images_per_prompt 1 --actor.freeze_visual_encoder --data.apply_chat_template
   --actor.gradient_checkpointing_enable --ds.attn_implementation eager --vllm.sync_backend nccl --vllm.enforce_eager
   --vllm.enable_sleep --ds.enable_sleep
"""


def picture(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (28 + 14 * (number % 3), 40, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_an_agent_file_with_images_trains_two_steps(envgym, tmp_path, store):
    texts = ["Where is the button?\n user assistant", "And now? No screen.\n left right\n"] * 3
    make_vision_model("qwen2_5_vl", tmp_path / "new", texts)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "screens").mkdir()
    rows = []
    for number in range(8):
        path = tmp_path / "screens" / f"{number}.png"
        path.write_bytes(picture(number))
        parts = [{"type": "image"}, {"type": "text", "text": f"Where is button {number}?"}]
        rows.append({"prompt": [{"role": "user", "content": parts}], "screens": [str(path)], "label": "left"})
    write(tmp_path / "rows.jsonl", rows)
    # An answer ends where the policy ends it: a new policy would fill the context in its first turn.
    sides = [{"prompt": row["prompt"], "completion": side, "screens": row["screens"]} for row in rows for side in SIDES]
    write(tmp_path / "sides.jsonl", sides)
    envgym("train", "--recipe", "sft", "--model", "new", "data.path=sides.jsonl", "data.images=screens", "steps=40",
           "learner.lr=3e-3", "rollout.tasks_per_step=16", "eval.every=0", "--name", "sft")  # fmt: skip
    (tmp_path / "model").symlink_to(tmp_path / "runs" / "sft" / "model")
    words = [sys.executable, "-m", "envgym.openrlhf", "train_ppo_ray", *COMMAND.split()]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = tmp_path / "kept" / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "mismatch/mean_abs" in record]
    assert len(steps) == 2
    assert max(step["mismatch/mean_abs"] for step in steps) < 0.03  # in bfloat16
    trained, start = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "model"))
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, start[name].to(tensor.dtype))}
    assert moved
    assert not [name for name in moved if "visual" in name]
    episodes = read_episodes(run)
    assert len(episodes) == 8 * 4
    check_prompts(episodes, AutoProcessor.from_pretrained(tmp_path / "model"))
    store("openrlhf_images", mismatch=[step["mismatch/mean_abs"] for step in steps],
          images=len(list((run / "images").iterdir())))  # fmt: skip
    assert len(list((run / "images").iterdir())) > 8


def check_prompts(episodes, processor):
    """Every text that the policy did not sample has the ids that the processor makes of it and of its images."""
    marks = 0
    for episode in episodes:
        shown = {image.sha256: image for message in episode.messages for image in message.images}
        for row in episode.rows:
            for segment in row.segments:
                if segment.role == "action":
                    continue
                ids = list(segment.token_ids)
                short, end = [], 0
                for span in segment.images:  # one placeholder in an image's place
                    short += [*ids[end : span.start], processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")]
                    end = span.end
                text = processor.tokenizer.decode(short + ids[end:])
                opened = [Image.open(io.BytesIO(shown[span.sha256].read())) for span in segment.images]
                expected = processor(text=[text], images=[opened] if opened else None)["input_ids"][0]
                assert ids == list(expected)
                marks += len(opened)
    assert marks > len(episodes)
