"""Images before sampled tokens in the families of vision-language models: the same log-probabilities in vLLM and in
transformers, before, during and after new weights."""

import pytest

from envgym.engine import Request, SamplingParams
from envgym.errors import InvalidOutcome
from envgym.render import RenderConfig, load_renderer
from envgym.types import Message, Observation, int_array
from tests.vision_episodes import CORPUS, check_figures, compare_family, picture, with_engine
from tests.vision_models import KINDS, make_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gemma3"])
def test_what_is_sampled_is_what_transformers_computes(tmp_path, store, kind):
    figures = compare_family(kind, tmp_path)
    store(f"image_sampling_{kind}", **figures)
    check_figures(figures)


def test_gemma_3_with_images_is_refused_on_a_cpu(tmp_path):
    folder = make_vision_model("gemma3", tmp_path / "model", CORPUS)
    observation = Observation(messages=(Message.user("Look:", picture(0)),))
    prompt = load_renderer(str(folder), RenderConfig()).dialogue().begin(observation)

    async def body(pool):
        request = Request("0", int_array(prompt.token_ids), SamplingParams(4), images=prompt.images)
        with pytest.raises(
            InvalidOutcome, match="no images here: gemma3 attends both ways within an image, and vLLM does not on a"
        ):
            await pool.generate(request)
        return await pool.generate(Request("1", int_array([40, 41]), SamplingParams(4)))

    assert with_engine(folder, tmp_path, body).token_ids

    async def refused(pool):
        request = Request("0", int_array(prompt.token_ids), SamplingParams(4), images=prompt.images)
        with pytest.raises(InvalidOutcome, match=r"the engine \(vllm .*\) takes no images here: set engine.kind=vllm"):
            await pool.generate(request)

    with_engine(folder, tmp_path, refused, engine_args={"language_model_only": True})
