"""The documents' own commands, a program each, run to their end by the launchers that stand in front of them; where no
document is at hand, those of `tests/openrlhf/commands.md`.

What is substituted is in `SUBSTITUTED`: model, data, sizes and places. Everything else is as the document has it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "openrlhf"))
from seeds import commands, documents  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BIN = Path(sys.executable).parent
SUBSTITUTED = {
    "--pretrain": "model", "--teacher_model": "model", "--ref_pretrain": "model", "--model_path": "model",
    "--reward_pretrain": "judge", "--lora_path": "adapter",
    "--dataset": "data", "--prompt_data": "prompts.jsonl", "--remote_rm_url": "reward_func.py",
    "--agent_func_path": "agent_func.py", "--save_path": "saved", "--ckpt_path": "kept/run", "--output_path": "out",
    "--max_len": 256, "--max_samples": 16, "--train_batch_size": 8, "--micro_train_batch_size": 2,
    "--rollout_batch_size": 8, "--prompt_max_len": 128, "--generate_max_len": 32, "--max_new_tokens": 32,
    "--actor_num_gpus_per_node": 1, "--critic_num_gpus_per_node": 1, "--ref_num_gpus_per_node": 1,
    "--reward_num_gpus_per_node": 1, "--vllm_num_engines": 1, "--vllm_tensor_parallel_size": 1, "--tp_size": 1,
    "--vllm_gpu_memory_utilization": 0.3, "--zero_stage": 2, "--best_of_n": 4, "--n_samples_per_prompt": 4,
}  # fmt: skip
"""What stands in place of a flag's value; sizes that a command does not say are added."""
ALWAYS = ("--max_samples", "--train_batch_size", "--micro_train_batch_size")
ALWAYS_PPO = (*ALWAYS, "--rollout_batch_size", "--prompt_max_len", "--generate_max_len", "--actor_num_gpus_per_node",
              "--critic_num_gpus_per_node", "--ref_num_gpus_per_node", "--prompt_data", "--vllm_gpu_memory_utilization",
              "--ckpt_path", "--save_path")  # fmt: skip
LEFT_OUT = ("--use_wandb", "{wandb_token}", "{token}")  # nobody to report to
AGENT = '''
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
import torch


class AgentInstance(AgentInstanceBase):
    """Pays for the parity of the first character, so that answers to one prompt differ."""

    def __init__(self, *args, **kwargs):  # OpenRLHF's own base class demands one
        pass

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        text = states["action_text"]
        reward = torch.tensor(float(ord(text[0]) % 2) if text else 0.5)
        return {"rewards": reward, "scores": reward, "environment_feedback": "", "done": True,
                "sampling_params": states["sampling_params"], "extra_logs": {}}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
'''
REWARD = """
import torch


def reward_func(queries, prompts, labels):
    rewards = torch.tensor([len(query) % 7 / 6 for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model, tiny_reward_model):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "model").symlink_to(tiny_model)
    (folder / "judge").symlink_to(tiny_reward_model)
    (folder / "agent_func.py").write_text(AGENT)
    (folder / "reward_func.py").write_text(REWARD)
    asks = [f"What is {n} + {n + 3}?" for n in range(16)]
    user = [[{"role": "user", "content": ask}] for ask in asks]

    def said(n, text):
        return [*user[n], {"role": "assistant", "content": text}]

    rows = {
        "prompts": [{"input": ask, "context_messages": user[n], "prompt": ask, "answer": str(n), "label": str(n)}
                    for n, ask in enumerate(asks)],
        "train_sft": [{"question": ask, "response": f"it is {n}", "input": ask, "output": f"it is {n}"}
                      for n, ask in enumerate(asks)],
        "pairs": [{"prompt": user[n], "chosen": said(n, f"{2 * n + 3}"), "rejected": said(n, "no")}
                  for n in range(len(asks))],
        "text_pairs": [{"prompt": ask, "chosen": "yes", "rejected": "no"} for ask in asks],
        "train_kto": [{"instruction": ask, "response": f"it is {n}", "score": n % 2 == 0}
                      for n, ask in enumerate(asks)],
        "train_prm": [{"input": f"{ask} First. ки\nThen {n}. ки", "value": ["+", "-"]} for n, ask in enumerate(asks)],
    }  # fmt: skip
    for name, own in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    return folder


DATA = {"train_rm": "pairs", "train_dpo": "pairs", "train_kd": "train_sft", "batch_inference": "prompts"}


def substituted(command, given):
    """The command's flags with what this machine has in place of the document's."""
    values = {**SUBSTITUTED, "--dataset": f"{DATA.get(command.program, command.program)}.jsonl", **given}
    words, flags = [], iter(command.flags)
    used = set()
    for flag in flags:
        if flag in LEFT_OUT or flag == "...":
            continue
        words.append(flag)
        if flag in values:
            next(flags)
            words.append(str(values[flag]))
            used.add(flag)
    always = ALWAYS_PPO if command.program == "train_ppo_ray" else ALWAYS if command.program.startswith("train") else ()
    for flag in [*always, *given]:
        if flag not in used and flag not in words:
            words += [flag, str(values[flag])]
    return words


def started(folder, launcher, program, words, **environ):
    """Run a program behind a launcher, as the one line of `sed` in docs/reference/openrlhf_commands.md writes it."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}", **environ}
    return subprocess.run(
        [*launcher, "envgym.openrlhf", program, *map(str, words)],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def only(place, program, folder):
    return next(command for command in commands(place, folder) if command.program == program)


def place_of(document, ours):
    """The block that is run: a document's where it is at hand, else ours of the same kind."""
    return document if documents() else ours


RECORDED = [
    (place_of("000:244", "dpo"), "train_dpo", ("deepspeed", "--module"), {}),
    (place_of("003:54", "sft"), "train_sft", ("deepspeed", "--num_gpus=2", "--module"), {}),
    (place_of("003:93", "rm"), "train_rm", (sys.executable, "-m"), {}),
    (place_of("003:276", "kto"), "train_kto", (sys.executable, "-m"), {}),
    (place_of("003:602", "kd"), "train_kd", ("torchrun", "--nproc_per_node=2", "-m"), {}),
]


@pytest.mark.parametrize(("place", "program", "launcher", "given"), RECORDED, ids=lambda value: str(value)[:24])
def test_programs_that_learn_from_recorded_data(place, program, launcher, given, folder, store):
    saved = f"saved_{program}"
    words = substituted(only(place, program, folder), {"--save_path": saved, "--ckpt_path": f"kept/{program}", **given})
    done = started(folder, launcher, program, words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((folder / "kept" / program / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert (folder / saved / "model.safetensors").is_file()
    store(
        f"openrlhf_{program}",
        place=place,
        words=words,
        launcher=[Path(word).name for word in launcher[:2]],
        seconds=summary["seconds"],
    )


def test_a_process_reward_model_and_its_data_of_one_text(folder):
    flags = ["--pretrain", "model", "--dataset", "train_prm.jsonl", "--input_key", "input", "--label_key", "value",
             "--placeholder_token", "ки", "--reward_tokens", "+", "-", "--train_batch_size", "8", "--max_len", "256",
             "--save_path", "saved_prm", "--ckpt_path", "kept/prm", "--load_checkpoint"]  # fmt: skip
    done = started(folder, (sys.executable, "-m"), "train_prm", flags)
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = [json.loads(line) for line in (folder / "kept/prm/metrics.jsonl").read_text().splitlines()]
    assert [record["tokens/trained"] for record in metrics if "tokens/trained" in record] == [16, 16]  # two an answer


def test_rejection_sampling_in_three_commands(folder, store):
    """Generate, judge, teach: what one writes the next reads, in OpenRLHF's own rows."""
    generate, judge, teach = commands(place_of("003:313", "rejection"), folder)[:3]
    played = {"--output_path": "generated.jsonl", "--dataset": "prompts.jsonl"}
    done = started(folder, (sys.executable, "-m"), "batch_inference", substituted(generate, played))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    assert 24 <= len(rows) <= 32  # eight prompts, four answers each, without the empty ones
    assert all(row["input"].startswith("<|im_start|>user\nWhat is") for row in rows)
    judged = {"--pretrain": "judge", "--dataset": "generated.jsonl", "--output_path": "best.jsonl"}
    done = started(folder, ("deepspeed", "--module"), "batch_inference", substituted(judge, judged))
    assert done.returncode == 0, done.stderr[-2000:]
    best = [json.loads(line) for line in (folder / "best.jsonl").read_text().splitlines()]
    assert len(best) == len({row["input"] for row in rows})
    every = [json.loads(line) for line in (folder / "best.jsonl.episodes.jsonl").read_text().splitlines()]
    for row in best:
        rivals = [one["reward"] for one in every if one["messages"][0]["content"] == row["input"]]
        assert row["reward"] == max(rivals)
    taught = {"--dataset": "best.jsonl", "--save_path": "saved_rejection", "--ckpt_path": "kept/rejection"}
    done = started(folder, ("deepspeed", "--module"), "train_sft", substituted(teach, taught))
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "saved_rejection" / "config.json").is_file()
    store("openrlhf_rejection_sampling", rows=len(rows), best=len(best))


def test_an_adapter_of_a_reward_model_is_merged(folder):
    flags = ["--pretrain", "model", "--dataset", "pairs.jsonl", "--apply_chat_template", "--lora_rank", "4",
             "--target_modules", "q_proj,v_proj", "--train_batch_size", "8", "--max_len", "256", "--save_path",
             "adapter", "--ckpt_path", "kept/adapter"]  # fmt: skip
    done = started(folder, (sys.executable, "-m"), "train_rm", flags)
    assert done.returncode == 0, done.stderr[-2000:]
    words = substituted(only(place_of("001:684", "merge"), "lora_combiner", folder), {"--output_path": "merged"})
    done = started(folder, (sys.executable, "-m"), "lora_combiner", words)
    assert done.returncode == 0, done.stderr[-2000:]
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained(folder / "merged").config.num_labels == 1


def test_dpo_of_rlhf_yaml_by_torchrun(folder):
    """The second document's `torchrun --nproc_per_node=4 self_model/rlhf/train_dpo.py --config …`, on two ranks."""
    import yaml

    file = {"model_name_or_path": "model", "ref_model_name_or_path": "model", "beta": 0.1, "loss_type": "sigmoid",
            "data": {"train_file": "text_pairs.jsonl", "max_length": 128}, "trace": "none",
            "training_args": {"output_dir": "saved_yaml", "per_device_train_batch_size": 2, "num_train_epochs": 1,
                              "gradient_accumulation_steps": 2, "bf16": True}}  # fmt: skip
    (folder / "rlhf.yaml").write_text(yaml.safe_dump(file))
    command = next(c for c in commands(place_of("002:12", "yaml"), folder) if c.launcher[0] == "torchrun")
    words = ["rlhf.yaml" if word.endswith(".yaml") else word for word in command.flags]
    done = started(folder, ("torchrun", "--nproc_per_node=2", "-m"), command.program, words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "saved_yaml" / "model.safetensors").is_file()


REINFORCED = [
    (place_of("000:51", "ppo"), "ppo", {"--n_samples_per_prompt": 1}),
    (place_of("000:225", "agent"), "agent", {"--n_samples_per_prompt": 4}),
    (place_of("001:557", "function"), "reward_function", {"--n_samples_per_prompt": 1}),
    (place_of("004:120", "grpo"), "grpo", {"--n_samples_per_prompt": 4}),
]


@pytest.fixture(scope="module")
def cluster(folder):
    """A Ray cluster of this machine, with the dashboard that jobs are handed to."""
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1"}
    token = ["ray", "get-auth-token", "--generate"]  # else the first cluster of a machine does not start
    subprocess.run(token, env=environ, check=True, capture_output=True, timeout=120)
    words = ["ray", "start", "--head", "--num-cpus", "8", "--port", "6391", "--include-dashboard=true",
             "--dashboard-port", "8291", "--disable-usage-stats"]  # fmt: skip
    subprocess.run(words, env=environ, check=True, capture_output=True, timeout=120)
    yield environ
    subprocess.run(["ray", "stop", "--force"], env=environ, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(("place", "name", "given"), REINFORCED, ids=[name for _, name, _ in REINFORCED])
def test_reinforcement_learning_as_a_job_of_a_ray_cluster(place, name, given, folder, cluster, store):
    kept = {"--save_path": f"saved_{name}", "--ckpt_path": f"kept/{name}"}
    words = substituted(only(place, "train_ppo_ray", folder), {**kept, **given})
    variables = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    launcher = ("ray", "job", "submit", "--address=http://127.0.0.1:8291",
                f"--runtime-env-json={json.dumps(variables)}", "--", "sh", "-c",
                f'cd {folder} && exec {sys.executable} -m "$@"', "job")  # fmt: skip
    done = started(folder, launcher, "train_ppo_ray", words, RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = json.loads((folder / "kept" / name / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["failures"] == {}
    assert (folder / f"saved_{name}" / "model.safetensors").is_file()
    assert "--runtime ray" in done.stdout
    store(f"openrlhf_{name}", place=place, words=words, seconds=summary["seconds"], steps=summary["steps"])


def test_a_reward_model_and_then_ppo_whose_critic_starts_from_it(folder, store):
    """The first document's pipeline: a critic that is saved untrained has the reward model's weights."""
    from safetensors.torch import load_file

    rm = {"--dataset": "pairs.jsonl", "--learning_rate": 0.01, "--save_path": "pipeline_rm",
          "--ckpt_path": "kept/pipeline_rm"}  # fmt: skip
    words = substituted(only(place_of("003:93", "rm"), "train_rm", folder), rm)
    done = started(folder, (sys.executable, "-m"), "train_rm", words)
    assert done.returncode == 0, done.stderr[-2000:]
    ppo = {"--reward_pretrain": "pipeline_rm", "--critic_learning_rate": 0, "--n_samples_per_prompt": 1,
           "--save_path": "pipeline_ppo", "--ckpt_path": "kept/pipeline_ppo"}  # fmt: skip
    words = substituted(only(place_of("000:51", "ppo"), "train_ppo_ray", folder), ppo)
    done = started(folder, (sys.executable, "-m"), "train_ppo_ray", [*words, "--save_value_network"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((folder / "kept/pipeline_ppo/summary.json").read_text())
    assert summary["status"] == "completed"
    rewarding, critic = (
        load_file(folder / name / "model.safetensors") for name in ("pipeline_rm", "pipeline_ppo_critic")
    )
    assert set(critic) == set(rewarding)
    for name, tensor in critic.items():
        assert (tensor.float() - rewarding[name].float()).abs().max() < 1e-2 * rewarding[
            name
        ].float().abs().max() + 1e-6
    actor = load_file(folder / "pipeline_ppo" / "model.safetensors")
    shared = [name for name in critic if name in actor]
    assert any((critic[name].float() - actor[name].float()).abs().max() > 1e-4 for name in shared)
    store("openrlhf_pipeline", words=words, steps=summary["steps"], seconds=summary["seconds"])


def test_a_reward_model_is_served(folder):
    flags = ["--reward_pretrain", "judge", "--port", "5079", "--bf16", "--flash_attn", "--max_len", "256"]
    words = [sys.executable, "-m", "envgym.openrlhf", "serve_rm", *flags]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert any("serving judge at" in line for line in server.stdout)
            body = json.dumps({"query": ["one", "two"], "prompts": ["o", "t"]}).encode()
            request = urllib.request.Request(
                "http://127.0.0.1:5079/get_reward", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert len(json.load(answer)["rewards"]) == 2
        finally:
            server.send_signal(signal.SIGINT)
            began = time.monotonic()
            server.wait(60)
    assert time.monotonic() - began < 60
