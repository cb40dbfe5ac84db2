"""Files of rows with images, from the file to the evaluation of what was trained on it, by commands alone."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from envgym.episodes.files import read_episodes
from tests.vision_models import make_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (40, 60, 210), "yellow": (230, 210, 40)}
QUESTION = "Which colour?"
GRADE = '''
import envgym

@envgym.reward
def names_the_colour(completion, answer):
    """Names the colour that the picture has."""
    return float(completion.strip() == answer)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A new model of LLaVA's shape with the four words as tokens."""
    corpus = [f"{QUESTION} {colour}\nuser assistant\n{colour}" for colour in COLOURS] * 4
    return make_vision_model("llava", tmp_path_factory.mktemp("llava"), corpus)


def png(colour: str, number: int) -> bytes:
    """A picture of a colour with noise, so that no two are equal."""
    noise = np.random.default_rng(number).integers(-30, 31, (56, 56, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def pictures(folder: Path, count: int, first: int = 0) -> list[tuple[str, str]]:
    """Colours, and the paths of their pictures, which are files in a folder of `folder`."""
    (folder / "pictures").mkdir(exist_ok=True)
    lines = []
    for number in range(first, first + count):
        colour, name = list(COLOURS)[number % 4], f"pictures/{number}.png"
        (folder / name).write_bytes(png(colour, number))
        lines.append((colour, name))
    random.Random(first).shuffle(lines)
    return lines


def shuffled(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same colours with the pictures of others."""
    names = [name for _, name in lines]
    random.Random(1).shuffle(names)
    return [(colour, name) for (colour, _), name in zip(lines, names, strict=True)]


def write(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def data_uri(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def asked(answer: str) -> list[dict]:
    """TRL's messages: a part says where the image is, a column which it is."""
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def trl(folder, lines):
    return [{"messages": asked(colour), "images": [name]} for colour, name in lines]


def trl_bytes(folder, lines):
    return [
        {"prompt": asked(colour)[:1], "completion": asked(colour)[1:],
         "images": [{"bytes": (folder / name).read_bytes(), "path": None}]} for colour, name in lines
    ]  # fmt: skip


def sharegpt(folder, lines):
    return [
        {"conversations": [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": colour}],
         "images": [data_uri(folder / name)]} for colour, name in lines
    ]  # fmt: skip


def openai(folder, lines):
    return [
        {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_uri(folder / name)}},
                                         {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": colour},
        ]} for colour, name in lines
    ]  # fmt: skip


def instruction(folder, lines):
    return [{"instruction": QUESTION, "output": colour, "image": name} for colour, name in lines]


def another(colour: str, name: str) -> str:
    """A wrong answer, drawn so that it says nothing of the right one."""
    return random.Random(name).choice([other for other in COLOURS if other != colour])


def trl_pairs(folder, lines):
    return [
        {"prompt": asked(colour)[:1], "chosen": asked(colour)[1:], "rejected": asked(another(colour, name))[1:],
         "images": [name]} for colour, name in lines
    ]  # fmt: skip


def sharegpt_pairs(folder, lines):
    return [
        {"conversations": [{"from": "human", "value": f"<image>{QUESTION}"}],
         "chosen": {"from": "gpt", "value": colour}, "rejected": {"from": "gpt", "value": another(colour, name)},
         "images": [{"bytes": (folder / name).read_bytes(), "path": None}]} for colour, name in lines
    ]  # fmt: skip


def trained(envgym, folder, name, recipe, data, model, *words):
    """The mean loss of a run's last steps."""
    envgym(
        "train", "--recipe", recipe, "--model", str(model), f"data.path={data}", "data.test_fraction=0", "--name", name,
        "rollout.tasks_per_step=32", "eval.every=0", "checkpoint.every=0", *words,
    )  # fmt: skip
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return float(np.mean([record["loss"] for record in records if "loss" in record][-4:]))


def score_of(folder: Path, name: str) -> float:
    """The share of right answers among those that name a colour, which at least twenty do. DPO moves policies to other
    words too: it lowers the rejected answers, whatever rises for it."""
    episodes = read_episodes(folder / "evals" / name)
    answers = [(episode.messages[-1].text.strip(), episode.task.answer) for episode in episodes]
    named = [answer == right for answer, right in answers if answer in COLOURS]
    assert len(named) >= 20
    return sum(named) / len(named)


def test_files_of_demonstrations_and_preferences_teach_the_colours_of_pictures(envgym, tmp_path, store, model):
    """The controls have the same rows with the pictures shuffled among them; all are evaluated on right ones. DPO
    begins with the control of SFT, which has learned to answer with a colour, and not which."""
    lines, figures = pictures(tmp_path, 256), {}
    (tmp_path / "grade.py").write_text(GRADE)
    held_out = [{"question": QUESTION, "answer": c, "image": name} for c, name in pictures(tmp_path, 64, 1000)]
    write(tmp_path / "held_out.jsonl", held_out)
    for recipe, suffix, spelling, start, words in (
        ("sft", "jsonl", trl, model, ("learner.lr=2e-3", "epochs=6")),
        ("dpo", "parquet", sharegpt_pairs, "runs/sft_control", ("learner.lr=3e-4", "learner.beta=0.5", "epochs=8")),
    ):
        for name, rows in ((f"{recipe}_control", shuffled(lines)), (recipe, lines)):
            write(tmp_path / f"{name}.{suffix}", spelling(tmp_path, rows))
            loss = trained(envgym, tmp_path, name, recipe, f"{name}.{suffix}", start, *words)
            envgym("eval", "--env", "grade.py", "--model", f"runs/{name}", "data.test_path=held_out.jsonl",
                   "--name", name, "rollout.max_tokens=8", "eval.greedy=false")  # fmt: skip
            figures[name] = {"loss": loss, "score": score_of(tmp_path, name)}
        store("image_data", **figures)
        assert figures[recipe]["loss"] < 0.3 * figures[f"{recipe}_control"]["loss"]
        assert figures[recipe]["score"] > 0.8
        assert figures[f"{recipe}_control"]["score"] < 0.5
    printed = envgym("show", "evals/dpo", "--prompt").stdout
    assert printed.count(f"[image 56 x 56]{QUESTION}") == 4
    assert printed.count("<image>" * 16) == 4
    episodes = read_episodes(tmp_path / "evals" / "dpo")
    assert {image.read() for e in episodes for m in e.messages for image in m.images} == {
        (tmp_path / row["image"]).read_bytes() for row in held_out
    }


@pytest.mark.parametrize(
    ("recipe", "spellings"),
    [
        ("sft", [(trl, "jsonl"), (trl_bytes, "parquet"), (sharegpt, "jsonl"), (openai, "jsonl"),
                 (instruction, "jsonl")]),
        ("dpo", [(trl_pairs, "jsonl"), (sharegpt_pairs, "parquet")]),
    ],
)  # fmt: skip
def test_all_spellings_of_the_same_rows_train_the_same_weights(envgym, tmp_path, model, recipe, spellings):
    lines = pictures(tmp_path, 16)
    weights = {}
    for name, rows in (("right", lines), ("control", shuffled(lines))):
        for spelling, suffix in spellings if name == "right" else spellings[:1]:
            run = f"{name}_{spelling.__name__}"
            write(tmp_path / f"data.{suffix}", spelling(tmp_path, rows))
            trained(envgym, tmp_path, run, recipe, f"data.{suffix}", model, "steps=2", "deterministic=true",
                    "rollout.tasks_per_step=8", "learner.lr=1e-3")  # fmt: skip
            weights[run] = (tmp_path / "runs" / run / "model" / "model.safetensors").read_bytes()
    control = weights.pop(f"control_{spellings[0][0].__name__}")
    assert len(weights) == len(spellings)
    assert len(set(weights.values())) == 1
    assert control not in weights.values()
