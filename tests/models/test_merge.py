"""`envgym model merge`: any adapter in peft's form becomes a model folder that says what the two said together."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from envgym.cli import main
from envgym.learner import RoleSpec
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.lora import LoraConfig
from envgym.workers.model import ModelWorker

IDS = torch.arange(3, 60)[None]


def make_adapter(folder: Path, model, task: str, *, head: str | None = None) -> torch.Tensor:
    """An adapter that changes much, saved by peft alone. Returns the logits of base and adapter together."""
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", task_type=task, modules_to_save=[head] if head else None
    )
    with_adapter = peft.get_peft_model(model, config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in with_adapter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
        logits = with_adapter(input_ids=IDS).logits
    with_adapter.save_pretrained(folder)
    return logits


def merge(capsys, *words) -> str:
    """What the command prints."""
    assert main(["model", "merge", *map(str, words)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.fixture
def adapter(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return tmp_path / "adapter", make_adapter(tmp_path / "adapter", model, "CAUSAL_LM")


def test_a_policy(adapter, tiny_model, tmp_path, capsys):
    folder, logits = adapter
    original = (tiny_model / "model.safetensors").read_bytes()
    assert merge(capsys, folder, tmp_path / "merged") == f"{tmp_path}/merged\n"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        says, expected = (
            tensor[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])
            for tensor in (merged(input_ids=IDS).logits, logits)
        )
    torch.testing.assert_close(says, expected, atol=1e-5, rtol=0)
    assert load_file(tmp_path / "merged/model.safetensors").keys() == load_file(tiny_model / "model.safetensors").keys()
    assert (tiny_model / "model.safetensors").read_bytes() == original
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


@pytest.mark.parametrize(("size", "dtype"), [(1e-6, torch.float32), (1e-1, torch.bfloat16)])
def test_a_change_that_the_bases_format_loses(tiny_model, tmp_path, capsys, size, dtype):
    """An adapter on weights in 16 bits is merged in float32 if rounding would undo it, with a line."""
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    make_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), "CAUSAL_LM")
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    scaled = {name: tensor * (size if ".lora_B." in name else 1) for name, tensor in weights.items()}
    save_file(scaled, tmp_path / "adapter/adapter_model.safetensors")
    said = merge(capsys, tmp_path / "adapter", tmp_path / "merged", "--base", base)
    assert ("the merged model is in float32, since bfloat16 keeps 0% of what training changed" in said) == (size < 0.1)
    merged, before = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", base))
    assert {tensor.dtype for tensor in merged.values()} == {dtype}
    name = "model.layers.0.self_attn.q_proj.weight"
    prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
    change = scaled[f"{prefix}B.weight"] @ scaled[f"{prefix}A.weight"] * 6 / 4
    expected = (before[name].float() + change).to(dtype)
    torch.testing.assert_close(merged[name], expected, atol=1e-9, rtol=1e-6 if dtype == torch.float32 else 0.01)


def test_a_base_that_has_moved(adapter, tiny_model, tmp_path, capsys):
    folder, _ = adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/away"}))
    assert main(["model", "merge", str(folder), str(tmp_path / "merged")]) == 2
    assert f"the base of {folder} is not at /gone/away: give its path with --base" in capsys.readouterr().err
    merge(capsys, folder, tmp_path / "merged", "--base", tiny_model)


def test_a_base_without_a_tokenizer(adapter, tiny_model, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("token*", "chat*"))
    assert f"{bare} has no tokenizer" in merge(capsys, adapter[0], tmp_path / "merged", "--base", bare)


@pytest.mark.parametrize("base", ["tiny_reward_model", "tiny_model"], ids=["has a head", "has none"])
def test_a_reward_model(base, request, tmp_path, capsys):
    from envgym.services import RewardModel
    from envgym.services.reward_worker import RewardWorker

    folder = request.getfixturevalue(base)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    logits = make_adapter(tmp_path / "adapter", model, "SEQ_CLS", head="score")
    merge(capsys, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    text = "what is twelve plus thirty-four?"
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS).logits, logits, atol=1e-5, rtol=0)
        ids = AutoTokenizer.from_pretrained(folder).encode(f"{text}<|im_end|>", return_tensors="pt")
        expected = float(merged(input_ids=ids).logits[0, 0])
    [(reward, _, _)] = RewardWorker(RewardModel(model=str(tmp_path / "merged"))).score([text])
    assert reward == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def worker_of(tiny_model):
    """worker_of(head, lora) -> a worker whose adapter has moved."""
    workers = []

    def make(head, **lora):
        role = RoleSpec(trained=True, head=head)
        worker = ModelWorker(WorkerSpec("actor", str(tiny_model), role, lora=LoraConfig(rank=4, **lora)))
        workers.append(worker)
        worker.load()
        torch.manual_seed(3)
        for name, parameter in worker.network.named_parameters():
            if ".lora_" in name or ".modules_to_save." in name:
                parameter.data.add_(torch.randn_like(parameter) / 10)
        return worker

    yield make
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(("head", "quantize"), [("lm", "none"), ("scalar", "none"), ("lm", "4bit")])
def test_what_a_run_leaves_is_what_merging_its_adapter_gives(worker_of, tmp_path, capsys, head, quantize):
    worker = worker_of(head, quantize=quantize)
    worker.save(str(tmp_path / "model"))
    worker.export_adapter(str(tmp_path / "adapter"))
    merge(capsys, tmp_path / "adapter", tmp_path / "merged")
    left, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "merged"))
    assert left.keys() == merged.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-7, rtol=1e-6)
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    _, loading = kind.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not loading["missing_keys"]


@pytest.mark.parametrize("size", [1e-6, 1.0], ids=["lost", "kept"])
def test_a_run_in_16_bits_leaves_what_its_adapter_changed(worker_of, tmp_path, size):
    worker = worker_of("lm")
    worker.close()
    worker.settings = WorkersConfig(dtype="bfloat16")
    worker.load()
    torch.manual_seed(3)
    for name, parameter in worker.network.named_parameters():
        if ".lora_" in name:
            parameter.data.add_(torch.randn_like(parameter) / 10 * (size if ".lora_B." in name else 1))
    words = worker.save(str(tmp_path / "model"))
    dtype = "float32" if size < 1 else "bfloat16"
    assert ("the adapter is merged in float32, since bfloat16 keeps 0% of what training changed" in words) == (size < 1)
    left = load_file(tmp_path / "model/model.safetensors")
    assert {str(tensor.dtype) for tensor in left.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == dtype
    exact = dict(worker.adapter.parameters(lambda _, tensor: tensor.detach(), merged=torch.float32))
    for name, tensor in exact.items():
        if name in left:
            assert torch.equal(left[name], tensor.to(left[name].dtype))


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def other_kind(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')


def not_a_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def broken_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")


def of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor[:, :3].clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def of_other_layers(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({f"{name}s": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def of_more_layers(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    extra_layer = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in tensors.items()}
    save_file({**extra_layer, **tensors}, folder / "adapter_model.safetensors")


def anonymous(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))


def for_translation(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "SEQ_2_SEQ_LM"}))


@pytest.mark.parametrize(
    ("spoil", "words", "message"),
    [
        (None, ["nothing", "out"], "there is no adapter folder nothing"),
        (None, [".", "out"], "peft's form: it has no adapter_config.json. Did you mean adapter?"),
        (None, ["adapter", "adapter"], "adapter exists: give the merged model another name"),
        (None, ["adapter", "out", "--base", "adapter"], "the base adapter is no model folder: it has no config.json"),
        (None, ["adapter"], "the following arguments are required: OUT"),
        (None, ["adapter", "out", "seed=1"], "an adapter is merged as it is: leave out seed=1"),
        (None, ["adapter", "adapter/adapter_config.json/out"], "adapter_config.json/out cannot be written: Not a dir"),
        (without_weights, ["adapter", "out"], "the adapter folder adapter has no adapter_model.safetensors"),
        (other_kind, ["adapter", "out"], "adapter holds an adapter of kind IA3, and only LORA can be merged"),
        (not_a_config, ["adapter", "out"], "adapter/adapter_config.json is not the config of an adapter"),
        (broken_weights, ["adapter", "out"], "adapter/adapter_model.safetensors cannot be read"),
        (of_another_shape, ["adapter", "out"], "the adapter adapter is of another model than"),
        (of_more_layers, ["adapter", "out"], "the adapter adapter is of another model than"),
        (of_other_layers, ["adapter", "out"], "the adapter adapter is of another model than"),
        (anonymous, ["adapter", "out"], "the adapter adapter does not name its base: give it with --base"),
        (for_translation, ["adapter", "out"], "adapters for SEQ_2_SEQ_LM cannot be merged, only those for CAUSAL_LM"),
    ],
    ids=lambda value: getattr(value, "__name__", " "),
)
def test_a_mistake_is_one_line(adapter, tmp_path, monkeypatch, capsys, spoil, words, message):
    monkeypatch.chdir(tmp_path)
    if spoil is not None:
        spoil(tmp_path / "adapter")
    assert main(["model", "merge", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


def test_a_reward_adapter_without_a_head_for_a_base_without_one(adapter, tmp_path, capsys):
    folder, _ = adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "SEQ_CLS"}))
    assert main(["model", "merge", str(folder), str(tmp_path / "merged")]) == 2
    assert "has weights for score" in capsys.readouterr().err
