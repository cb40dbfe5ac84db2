"""Stop texts of observations, also of environments that a stranger has written."""

import pytest

from envgym.errors import InvalidStep
from envgym.render import load_tokenizer, make_renderer
from envgym.render.renderer import sampling_of
from envgym.types import Observation


@pytest.fixture
def renderer(tiny_model):
    return make_renderer("chat", load_tokenizer(str(tiny_model)))


def test_a_stop_becomes_the_tokens_that_contain_it_and_other_parameters_stay(renderer):
    sampling = sampling_of(Observation(text="x", sampling={"stop": "4", "seed": 3}), renderer)
    with_4 = [token for token in range(len(renderer.tokenizer)) if "4" in renderer.text([token])]
    assert sampling == {"seed": 3, "stop_token_ids": (*renderer.stop_token_ids, *with_4)}
    assert 1 <= len(with_4) < 10


@pytest.mark.parametrize(
    "stop", ["", None, 4, True, ["4"], {"4": 1}, b"4", ["4"] * 10**5], ids=lambda stop: repr(stop)[:9]
)
def test_a_stop_that_is_no_text_is_the_environments_mistake(renderer, stop):
    with pytest.raises(InvalidStep, match=r"^the stop of an observation's sampling is a text, not ") as failure:
        sampling_of(Observation(text="x", sampling={"stop": stop}), renderer)
    assert len(str(failure.value)) < 150


def test_the_vocabulary_is_decoded_once_whatever_each_step_stops_at(renderer, monkeypatch):
    decoded, text = [], renderer.text
    monkeypatch.setattr(renderer, "text", lambda ids: decoded.append(ids) or text(ids))
    for stop in ("4", "6", "a", "e", "is"):
        assert sampling_of(Observation(text="x", sampling={"stop": stop}), renderer)["stop_token_ids"]
    assert len(decoded) == len(renderer.tokenizer)
