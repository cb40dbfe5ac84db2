"""Write runs, an evaluation and files of episodes as this checkout writes them, and pack them for those who come later.

    .venv/bin/python tests/data/old_folders/make.py tests/data/old_folders/NAME.tar.xz

`tests/acceptance/test_old_folders.py` resumes, shows, scores, views and compares what an archive holds. An archive is
never made anew: it is named after the commit that wrote it, and a format that changes gets another one beside it. The
model is as small as vLLM takes it, so that checkpoints are small.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ENVGYM = Path(sys.executable).with_name("envgym")

LETTERS = '''
import envgym


class Letters(envgym.Env):
    """The share of characters that are lower-case letters: a reward that random weights vary in."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": f"Say {self.rng.randint(1, 9)}."}], {}

    async def step(self, action):
        share = sum("a" <= letter <= "z" for letter in action.text) / max(1, len(action.text))
        return None, share, True, False, {"score": share}
'''

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMALL = [
    "rollout.tasks_per_step=4", "rollout.group_size=2", "rollout.max_tokens=6", "eval.tasks=2",
    "engine.max_model_len=128",
    "checkpoint.every=1", "checkpoint.keep=1", "learner.lr=1e-3",
]  # fmt: skip


def make_model(folder: Path) -> None:
    """A Qwen3 policy of 11 thousand parameters with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant say one letter, then another letter"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=288, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=None, eos_token_id=0, pad_token_id=2, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def envgym(folder: Path, *words: str) -> None:
    print("envgym", *words, flush=True)
    subprocess.run([str(ENVGYM), *words], cwd=folder, check=True)


def make_folders(folder: Path) -> None:
    make_model(folder / "tiny")
    (folder / "letters.py").write_text(LETTERS)
    rows = [{"prompt": f"say {n}", "chosen": f"{n}", "rejected": "no"} for n in range(16)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = [{"prompt": row["prompt"], "answer": row["chosen"]} for row in rows]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    train = ["train", "--env", "letters.py", "--model", "tiny", *SMALL, "steps=2"]
    plain = "engine.kind=transformers"
    envgym(folder, *train, "--name", "synchronous")
    envgym(folder, *train, plain, "--name", "asynchronous", "rollout.max_staleness=2")
    envgym(folder, *train, plain, "--name", "lora", "lora.rank=2")
    envgym(folder, *train, plain, "--name", "ppo", "--learner", "ppo")
    data = [f"stages.{name}.data.path=pairs.jsonl" for name in ("sft", "rm", "ppo")]
    short = ["stages.sft.epochs=0.3", "stages.rm.epochs=0.3", "stages.ppo.steps=1"]
    envgym(folder, "train", "--recipe", "rlhf", "--model", "tiny", "--name", "pipeline", *data, *SMALL, *short, plain)
    envgym(folder, "train", "--recipe", "sft", "--model", "tiny", "--name", "epochs", "data.path=answers.jsonl",
           "epochs=1", *SMALL)  # fmt: skip
    cheap = [plain, "rollout.max_tokens=6", "rollout.concurrency=4"]
    evaluate = ["eval", "--env", "letters.py", "eval.tasks=8", "eval.greedy=false", *cheap]
    envgym(folder, *evaluate, "--model", "tiny", "--name", "before")
    envgym(folder, *evaluate, "--model", "runs/synchronous", "--name", "after")
    sums = ["eval", "--env", "math_verify", "--model", "tiny", "--name", "sums", "eval.tasks=8", "eval.greedy=false"]
    envgym(folder, *sums, *cheap)
    rollout = ["rollout", "--env", "letters.py", "--model", "tiny", "--tasks", "0:8", "--samples", "2", *cheap]
    envgym(folder, *rollout, "--out", "episodes.jsonl")
    envgym(folder, *rollout, "--out", "episodes.parquet")


def main() -> None:
    archive = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folders(folder)
        with tarfile.open(archive, "w:xz", preset=9) as packed:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix not in (".png", ".log", ".pyc"):
                    packed.add(path, str(path.relative_to(folder)))
    print(f"{archive}: {archive.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
