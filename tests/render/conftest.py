"""Real chat templates over real vocabularies. The templates are read from TRL's wheel, which is installed for them
alone; nothing of it is imported."""

import copy
import re
from functools import cache
from importlib.metadata import files
from pathlib import Path

import pytest

from envgym.models.fresh import FreshModelConfig, make_fresh_model
from envgym.render import ChatRenderer, load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATTERN = re.compile(r"<\|\w+\|>|<｜[^｜]*｜>|<(?:start|end)_of_turn>")
"""What a template writes as special tokens."""


@cache
def template(family):
    """The text of a family's chat template."""
    if family == "chatml":
        return CHATML
    [path] = [Path(file.locate()) for file in files("trl") if file.name == f"{family}.jinja"]
    return path.read_text()


@pytest.fixture(scope="session")
def vocabulary(request, tmp_path_factory):
    """`vocabulary(name)`: a tokenizer with merges: `tekken` and `sentencepiece` are models' own, `starter` is ours."""

    @cache
    def load(name):
        if name == "starter":
            folder = tmp_path_factory.mktemp("starter")
            corpus = [Path(__file__).read_text(), "12 + 34 = 46, naïve 数学 🙂"]
            make_fresh_model(folder, FreshModelConfig(hidden_size=8, intermediate_size=8, layers=1, heads=1), corpus, 0)
        else:
            folder = request.getfixturevalue(f"{name}_folder")
        return load_tokenizer(str(folder))

    return load


@pytest.fixture(scope="session")
def chat(vocabulary):
    """`chat(vocabulary, family)`: a renderer whose tokenizer has a family's template and its special tokens. The
    family `own` is the vocabulary's own template. `eos` is the tokenizer's end token, where it is not its own."""

    @cache
    def make(name, family, eos=None):
        base = vocabulary(name)
        if family == "own":
            return ChatRenderer(base)
        tokenizer = copy.deepcopy(base) if name == "starter" or eos else copy.copy(base)
        tokenizer.chat_template = template(family)
        tokens = sorted(set(PATTERN.findall(tokenizer.chat_template)))
        # The large vocabularies are shared, so that every family's tokens gather in them.
        tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
        if eos is not None:
            tokenizer.eos_token = eos
        return ChatRenderer(tokenizer)

    return make
