"""`envgym model export`: a folder in 16 bit, and GGUF by a converter, for which a stand-in stands here."""

import sys
import textwrap

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from envgym.cli import main

CONVERTER = """
import argparse, json, sys
from pathlib import Path
import gguf
from safetensors.torch import load_file
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("--outfile", type=Path)
parser.add_argument("--outtype", choices=["f32", "f16", "bf16"])
options = parser.parse_args()
assert next(iter(load_file(options.model / "model.safetensors").values())).dtype.itemsize == 2
writer = gguf.GGUFWriter(options.outfile, json.loads((options.model / "config.json").read_text())["model_type"])
writer.add_chat_template(AutoTokenizer.from_pretrained(options.model).chat_template + TEMPLATE_TAIL)
writer.add_string("general.type_of_weights", options.outtype)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.fixture
def converter(tmp_path):
    def write(tail=""):
        path = tmp_path / "convert.py"
        path.write_text(f"TEMPLATE_TAIL = {tail!r}\n{textwrap.dedent(CONVERTER)}")
        return f"{sys.executable} {path}"

    return write


def test_a_folder_in_16_bit(tiny_model, tmp_path, capsys):
    assert main(["model", "export", str(tiny_model), str(tmp_path / "small")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "small")
    original, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model, tmp_path / "small"))
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.bfloat16}
    for old, new in zip(original.parameters(), exported.parameters(), strict=True):
        assert torch.equal(old.bfloat16(), new)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template


def test_a_reward_model_keeps_its_head(tiny_reward_model, tmp_path):
    assert main(["model", "export", str(tiny_reward_model), str(tmp_path / "small"), "--dtype", "float16"]) == 0
    _, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not loading["missing_keys"]


def test_gguf_by_the_users_converter(tiny_model, tmp_path, converter, capsys):
    from gguf import GGUFReader

    target = tmp_path / "model.gguf"
    assert main(["model", "export", str(tiny_model), str(target), "--converter", converter()]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    reader = GGUFReader(target)
    assert reader.get_field("general.type_of_weights").contents() == "bf16"
    template = AutoTokenizer.from_pretrained(tiny_model).chat_template
    assert reader.get_field("tokenizer.chat_template").contents() == template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convert.py", "model.gguf"]


@pytest.mark.slow
def test_another_template_is_said(tiny_model, tmp_path, converter, capsys):
    words = ["model", "export", str(tiny_model), str(tmp_path / "model.gguf"), "--converter", converter(" ")]
    assert main(words) == 0
    assert "the chat template in model.gguf is not the tokenizer's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["MODEL", "model.gguf"], "exporting model.gguf needs --converter"),
        (["MODEL", "folder", "--converter", "true"], "exporting folder needs a file that ends with .gguf"),
        (["MODEL", "model.gguf", "--converter", "no-such-program"], "the converter no-such-program does not start"),
        (
            ["MODEL", "model.gguf", "--converter", "false"],
            "the converter ended with exit status 1 and wrote no model.gguf",
        ),
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
