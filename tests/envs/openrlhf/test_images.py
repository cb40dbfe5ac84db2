"""Agent files whose feedback has images, as the interface of the newest versions gives them."""

import asyncio
import json

import numpy as np
import pytest

from envgym import Env, EnvSpec, registry
from envgym.agents.token_level import MultiTurn
from envgym.engine import SamplingParams
from envgym.errors import InvalidStep
from envgym.images import ImageFolder
from envgym.registry import load_component
from envgym.render import load_renderer
from envgym.render.config import RenderConfig
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import ImagePart, Message, Observation, Task
from tests.envs.openrlhf.conftest import Scripted
from tests.vision_models import make_vision_model

AGENT = """
import numpy as np
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states, **kwargs):
        return {{"observation": {observation}}}

    async def step(self, states, **kwargs):
        self.turn += 1
        screen = Image.fromarray(np.full((28, 28 * self.turn, 3), self.turn, np.uint8))
        marks = "<|vision_start|><|image_pad|><|vision_end|>" * {marks}
        return {{
            "rewards": float("left" in states["action_text"]),
            "environment_feedback": f"\\n<|im_start|>user\\n{{marks}}Where?<|im_end|>\\n<|im_start|>assistant\\n",
            "environment_images": {images},
            "done": self.turn == 3,
        }}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
SCREENS = [ImagePart.from_value(np.full((28, 28 * turn, 3), turn, np.uint8)) for turn in (1, 2)]
QUESTION = ImagePart.from_value(np.full((56, 28, 3), 9, np.uint8))


@pytest.fixture(scope="module")
def vision_renderer(tmp_path_factory):
    texts = ["Where is it? left right\n", "user assistant system Where? up down\n"]
    return load_renderer(str(make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"), texts)), RenderConfig())


def played(tmp_path, renderer, prompt, *, observation='states["observation"]', images="[screen]", marks=1):
    """The episode of a file, and what the policy was shown."""
    file, rows = tmp_path / "agent.py", tmp_path / "rows.jsonl"
    file.write_text(AGENT.format(observation=observation, images=images, marks=marks))
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "ab"))
    engine = Scripted(renderer, lambda member, turn: "left")

    async def main():
        async with registry.spec(str(file), data={"path": str(rows)}) as spec:
            agent_class = load_component("agent", spec.agent)
            assert issubclass(agent_class, MultiTurn)
            agent = agent_class(renderer, agent_class.Config())
            runner = Runner(spec, agent, engine, RolloutConfig(retries=0, refills=0), max_model_len=4096, seed=0,
                            deterministic=False)  # fmt: skip
            sampling = SamplingParams(max_tokens=16, stop_token_ids=renderer.stop_token_ids)
            [group] = await runner.roll_out([Task("t", prompt)], SamplingPlan("p", sampling, 1))
            return group.episodes[0]

    return asyncio.run(asyncio.wait_for(main(), 120)), engine


def test_images_of_feedback_stand_at_the_marks_in_its_text(vision_renderer, tmp_path):
    prompt = (Message("user", ["Where is it?", QUESTION]),)
    episode, engine = played(tmp_path, vision_renderer, prompt)
    assert episode.outcome.message == ""
    [row] = episode.rows
    names = [span.sha256 for span in row.images]
    assert names == [image.sha256 for image in (QUESTION, *SCREENS)]
    pad = vision_renderer.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    token_ids = list(row.token_ids)
    assert sum(id == pad for id in token_ids) == sum(token_ids[span.start : span.end].count(pad) for span in row.images)
    assert [len(request.images) for request in engine.requests] == [1, 2, 3]
    assert [part.image for part in engine.requests[-1].images] == [QUESTION, *SCREENS]
    shown = [image for message in episode.messages for image in message.images]
    assert shown == [QUESTION, *SCREENS]
    assert [turn.reward for turn in row.turns] == [1.0, 1.0, 1.0]


def test_a_reset_that_changes_the_text_keeps_the_images(vision_renderer, tmp_path):
    prompt = (Message("user", ["Where is it?", QUESTION]),)
    _, engine = played(tmp_path, vision_renderer, prompt, observation='"Now: " + states["observation"]')
    text = vision_renderer.tokenizer.decode(list(engine.requests[0].token_ids))
    assert "<|image_pad|>Now: Where is it?" in text
    assert [part.image for part in engine.requests[0].images] == [QUESTION]


@pytest.mark.parametrize(
    ("images", "marks", "problem"),
    [("[screen]", 2, "2 marks '<|image_pad|>' of images for 1"), ("[screen]", 0, "0 marks '<|image_pad|>' of images"),
     ("['/etc/passwd']", 1, "step returned environment_images: an image is not given as the text")],
)  # fmt: skip
def test_other_numbers_of_marks_and_other_things_fail_the_episode(vision_renderer, tmp_path, images, marks, problem):
    episode, _ = played(tmp_path, vision_renderer, "Where is it?", images=images, marks=marks)
    assert problem in episode.outcome.message


def test_images_belong_to_raw_text():
    with pytest.raises(TypeError, match="an observation's images are those of its raw text"):
        Observation(messages=(Message("user", "a"),), images=(QUESTION,))


def test_raw_text_with_images_begins_a_conversation(vision_renderer):
    observation = Observation(text="A <|vision_start|><|image_pad|><|vision_end|> B", images=(QUESTION,))
    extension = vision_renderer.dialogue().begin(observation)
    assert [placed.image for placed in extension.images] == [QUESTION]
    with pytest.raises(InvalidStep, match="0 marks"):
        vision_renderer.dialogue().begin(Observation(text="A", images=(QUESTION,)))


class Screens(Env):
    async def reset(self, *, seed=None, options=None):
        return Observation(text="<|image_pad|>", images=(options["image"],)), {}

    async def step(self, action):
        return None, 0.0, True, False, {}


def test_images_of_raw_text_are_read_to_the_end_and_stored(tmp_path):
    spec = EnvSpec("Screens-v0", Screens)
    spec.store_images(ImageFolder(tmp_path))
    noise = ImagePart.from_value(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))

    def first_image(image):
        async def main():
            async with spec.make() as env:
                observation, _ = await env.reset(options={"task": Task("t"), "image": image})
                return observation.images[0]

        return asyncio.run(main())

    assert first_image(noise).file == tmp_path / f"{noise.sha256}.png"
    with pytest.raises(InvalidStep, match="the file of an image cannot be read"):
        first_image(ImagePart.from_value(noise.data[:-2000]))
