"""Images before sampled tokens, in vLLM itself: the ids of a request are those computed, its log-probabilities those of
transformers. Of one family; `tests/acceptance/test_image_sampling.py` has the others."""

import asyncio
from dataclasses import replace

import numpy as np

from envgym.engine import Request, SamplingParams
from envgym.errors import InvalidOutcome
from envgym.render import RenderConfig, load_renderer
from envgym.types import ImageSpan, Message, Observation, PlacedImage, int_array
from tests.vision_episodes import CORPUS, Model, check_figures, compare_family, picture, with_engine
from tests.vision_models import make_vision_model

KIND = "qwen2_5_vl"


def test_sampled_log_probabilities_are_transformers_before_during_and_after_new_weights(tmp_path):
    check_figures(compare_family(KIND, tmp_path))


def test_what_is_not_a_prompts_is_refused_and_what_is_scored_is_exact(tmp_path):
    folder = make_vision_model(KIND, tmp_path / "model", CORPUS)
    renderer, sampling = load_renderer(str(folder), RenderConfig()), SamplingParams(80)
    content = ["Look:", picture(0), "and", picture(2), "here"]
    prompt = renderer.dialogue().begin(Observation(messages=(Message("user", content),)))
    ids, (first, second) = int_array(prompt.token_ids), prompt.images
    text = int_array(renderer.encode("red, green or blue"))
    (stored := tmp_path / "stored.png").write_bytes(picture(0, seed=1).read())
    wrong = {
        "none": (ids, ()),
        "one missing": (ids, (first,)),
        "in another order": (ids, (second._replace(start=first.start), first._replace(start=second.start))),
        "elsewhere": (ids, (first._replace(start=first.start + 1), second)),
        "one too many": (ids, (first, second, second)),
        "a text's": (text, (first,)),
        "another file": (ids, (first._replace(image=replace(first.image, data=None, file=stored)), second)),
        "no file": (ids, (first._replace(image=replace(first.image, data=None, file=tmp_path / "gone.png")), second)),
    }
    assert first.span == ImageSpan(first.image.sha256, first.start, 4)

    async def body(pool):
        assert (await pool.info()).takes_images

        async def ask(name, ids, images, sampling=sampling):
            try:
                return await pool.generate(Request(name, ids, sampling, images=images))
            except InvalidOutcome as error:
                return error

        refused = [await ask(name, *arguments) for name, arguments in wrong.items()]
        texts = await asyncio.gather(*(ask(f"text {n}", text, ()) for n in range(40)))
        scores = [await pool.probe(tuple(ids), images) for images in (prompt.images, prompt.images)]
        other = PlacedImage(picture(0, seed=1), first.start, first.length)
        return refused, texts, [*scores, await pool.probe(tuple(ids), (other, second))]

    refused, texts, scores = with_engine(folder, tmp_path, body, deterministic=True)
    for error in refused[:6]:
        assert error.kind == "images"
        assert "an agent passes the images of each observation beside its token ids" in str(error)
    assert str(refused[0]).startswith(
        "a prompt has 7 placeholders for 0 images, of which the model's processor finds 0"
    )
    assert [error.kind for error in refused[6:]] == ["images", "images"]
    assert "has changed: its content is not what it is named after" in str(refused[6])
    assert "cannot be read: No such file" in str(refused[7])
    failures = [text for text in texts if isinstance(text, InvalidOutcome)]
    assert 0 < len(failures) < len(texts)
    assert {error.kind for error in failures} == {"placeholder"}
    assert "the policy has sampled <|" in str(failures[0])
    model = Model(folder)
    for [scored], pictures in zip(scores, ([0, 0], [0, 0], [1, 0]), strict=True):
        images = [picture(number, seed) for number, seed in zip((0, 2), pictures, strict=True)]
        expected = model.logprobs(list(ids), images)
        np.testing.assert_allclose(
            [score for score in scored if score is not None][-len(expected) :], expected, atol=1e-5
        )
    assert np.abs(np.array(scores[0][0][1:]) - scores[2][0][1:]).max() > 1e-2
