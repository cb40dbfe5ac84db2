"""`envgym model export`: a folder in another number format."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.jobs.models import base_of_model, with_own_format
from envgym.models.rounding import WeightChange


def test_a_folder_in_16_bit(tiny_model, tmp_path, capsys):
    assert main(["model", "export", str(tiny_model), str(tmp_path / "small"), "--dtype", "bfloat16"]) == 0
    note, path = capsys.readouterr().out.splitlines()
    assert note.startswith("bfloat16 rounds the float32: without the model before training, its loss is not known")
    assert path == str(tmp_path / "small")
    original, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model, tmp_path / "small"))
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.bfloat16}
    for old, new in zip(original.parameters(), exported.parameters(), strict=True):
        assert torch.equal(old.bfloat16(), new)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template


def test_rounding_by_hand():
    """Numbers from 1 to 2 are 2**-7 apart in bfloat16: a change of 2**-10 is lost, one of 2**-7 is kept."""
    old, new = torch.ones(8), torch.ones(8)
    new[:5] += 2**-10
    new[5:7] += 2**-7
    change = WeightChange(torch.bfloat16)
    change.add(old, new)
    assert change.share == pytest.approx(2 * 4**-7 / (2 * 4**-7 + 5 * 4**-10))
    assert change.in_words == (
        "bfloat16 keeps 96% of what training changed: rounded, 71% of the changed weights equal the base's"
    )
    exact = WeightChange(torch.float32)
    exact.add(old, new)
    assert exact.share == 1
    assert WeightChange(torch.bfloat16).share == 1  # nothing has changed


def test_a_base_between_the_numbers_of_the_format():
    """Few weights cross to the next number, each by more than it was moved: together they have moved as far."""
    old = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    change = WeightChange(torch.bfloat16)
    change.add(old, old + 1e-3)
    assert change.share == pytest.approx(1, abs=0.05)


@pytest.fixture
def trained_run(tiny_model, tmp_path):
    """A run of two stages, whose second has moved the weights of a base in bfloat16 by a thousandth of their size."""
    base, run = tmp_path / "base", tmp_path / "runs/tuned"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    (run / "2-b").mkdir(parents=True)
    stages = [{"name": "a", "model": "base"}, {"name": "b", "model": "stage:a"}]
    learner = {"learner": {"name": "sft"}, "kind": "train"}
    (run / "config.yaml").write_text(yaml.safe_dump({"stages": [{**stage, **learner} for stage in stages]}))
    shutil.copytree(tiny_model, run / "2-b/model")
    torch.manual_seed(0)
    weights = load_file(base / "model.safetensors")
    moved = {name: tensor.float() * (1 + 1e-3 * torch.randn(tensor.shape)) for name, tensor in weights.items()}
    save_file(moved, run / "2-b/model/model.safetensors", metadata={"format": "pt"})
    return run


def test_an_export_keeps_what_was_trained(trained_run, tmp_path, capsys, monkeypatch):
    """By default bit for bit; in 16 bits it says what is left, compared with the model before the first stage."""
    monkeypatch.chdir(tmp_path)
    assert main(["model", "export", "runs/tuned", "exact"]) == 0
    assert capsys.readouterr().out == "exact\n"
    trained, exact = load_file(trained_run / "2-b/model/model.safetensors"), load_file("exact/model.safetensors")
    assert all(torch.equal(trained[name], exact[name]) for name in exact)
    monkeypatch.chdir("/")  # the base's relative path is of the folder that holds `runs`
    assert main(["model", "export", str(trained_run), str(tmp_path / "small"), "--dtype", "bfloat16"]) == 0
    note, _ = capsys.readouterr().out.splitlines()
    base, small = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "small"))
    lost = torch.cat([(small[name] == base[name])[trained[name] != base[name].float()] for name in trained])
    assert 0.5 < lost.float().mean() < 1
    assert f"rounded, {lost.float().mean():.0%} of the changed weights equal the base's" in note
    assert note.startswith("bfloat16 keeps ")
    assert note.endswith("; --dtype float32 keeps all of it")


def test_a_policy_trained_in_float32_is_sampled_in_it(trained_run, tiny_model):
    model, notes = str(trained_run / "2-b/model"), []

    def dtype(model: str, **settings) -> str:
        stage = resolve({"env": "math_verify", "model": model, **settings}).stages[0]
        return with_own_format(stage, model, notes.append).engine.dtype

    assert dtype(model) == "float32"
    assert not notes
    assert dtype(model, engine={"dtype": "bfloat16"}) == "bfloat16"
    assert notes.pop().startswith("engine.dtype=bfloat16: bfloat16 keeps ")
    assert dtype(model, workers={"dtype": "float16"}) == "float16"
    assert notes.pop().startswith("engine.dtype=float16: float16 keeps ")
    assert dtype(str(tiny_model)) == "auto"  # nobody trained it here


def test_the_base_of_a_checkpoint(trained_run, tmp_path):
    checkpoint = trained_run / "1-a/checkpoints/step_000001/model"
    assert base_of_model(checkpoint) == base_of_model(trained_run / "2-b/model") == tmp_path / "base"
    assert base_of_model(tmp_path / "base") is None


def test_other_users_may_read_the_weights_as_the_config(tiny_model, tmp_path):
    assert main(["model", "export", str(tiny_model), str(tmp_path / "out")]) == 0
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_a_full_disk_is_one_line(tiny_model, tmp_path):
    """The weights' library has an error of its own for it, and none of Python's."""
    envgym = Path(sys.executable).with_name("envgym")
    command = ["prlimit", "--fsize=20000", envgym, "model", "export", tiny_model, "out"]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # Python 3.11 would leave truncated compiled files
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "envgym: error: a file cannot be written: File too large"
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_reward_model_keeps_its_head(tiny_reward_model, tmp_path):
    assert main(["model", "export", str(tiny_reward_model), str(tmp_path / "small"), "--dtype", "float16"]) == 0
    _, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not loading["missing_keys"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere", "folder"], "nowhere holds no model"),
        (["MODEL", "MODEL"], "exists: give the exported model another name"),
        (["MODEL", "folder", "--dtype", "int3"], "--dtype"),
    ],
)
def test_a_mistake_is_one_line(tiny_model, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["model", "export", *(word.replace("MODEL", str(tiny_model)) for word in words)]) == 2
    stderr = capsys.readouterr().err
    assert says in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
