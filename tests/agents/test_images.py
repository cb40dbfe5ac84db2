"""Images in requests of programs: read in all three APIs, never fetched, and part of what a conversation repeats."""

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from envgym import Env, EnvSpec
from envgym.agents.external import External, ExternalConfig, responses_api
from envgym.agents.external.chat_api import CompletionRequest, Refusal
from envgym.agents.external.conversation import Conversation, ConversationBranch
from envgym.agents.external.messages_api import MessagesRequest
from envgym.agents.external.responses_api import ResponsesRequest
from envgym.engine import SamplingParams
from envgym.errors import InvalidStep
from envgym.images import ImageFolder
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import ImagePart, Message, Observation, Task
from tests.agents.test_external import Scripted, program


def picture(level):
    return ImagePart.from_value(np.full((4, 6, 3), level, np.uint8))


RED, BLUE = picture(1), picture(2)
SEEN = (Message("user", ["Which? ", RED]), Message("tool", ["See ", BLUE], tool_call_id="c", name="look"))


def data(image):
    return base64.b64encode(image.data).decode()


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat():
    def parts(text, image):
        return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": image.data_uri()}}]

    messages = [
        {"role": "user", "content": parts("Which? ", RED)},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "name": "look", "content": parts("See ", BLUE)},
    ]
    return CompletionRequest.parse({"model": "m", "messages": messages})


def responses():
    def parts(text, image):
        return [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": image.data_uri()}]

    items = [
        {"role": "user", "content": parts("Which? ", RED)},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": parts("See ", BLUE)},
    ]
    return ResponsesRequest.parse({"model": "m", "input": items})


def anthropic():
    def blocks(text, image):
        source = {"type": "base64", "media_type": "image/png", "data": data(image)}
        return [{"type": "text", "text": text}, {"type": "image", "source": source}]

    messages = [
        {"role": "user", "content": blocks("Which? ", RED)},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": blocks("See ", BLUE)}]},
    ]
    return MessagesRequest.parse({"model": "m", "max_tokens": 4, "messages": messages})


@pytest.mark.parametrize("request_of", [chat, responses, anthropic])
def test_images_are_read_from_requests(request_of):
    first, call, result = request_of().messages
    assert (first, result) == SEEN
    assert [image.read() for message in (first, result) for image in message.images] == [RED.data, BLUE.data]
    assert call.tool_calls[0].name == "look"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "file:///etc/passwd", "/etc/passwd", "data:,x", ""])
def test_nothing_is_fetched_or_opened(url):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with pytest.raises(Refusal, match="an image is not given as the text"):
        CompletionRequest.parse({"messages": [message]})


def test_items_of_the_responses_api_have_images():
    items = json.loads(json.dumps(responses_api.input_items(SEEN)))
    assert responses_api.messages_of(items) == (SEEN[0], Message("tool", ["See ", BLUE], tool_call_id="c"))


def test_a_conversation_with_another_image_is_another_one(tiny_model):
    renderer = make_renderer("chat", load_tokenizer(str(tiny_model)))
    branch = ConversationBranch(renderer, None, ())
    branch.messages = [Message("user", ["Which? ", RED]), Message("assistant", "red")]
    more = Message("user", "Sure?")
    for first, is_same in (
        (["Which? ", picture(1)], True),
        (["Which? ", BLUE], False),
        (["Which? "], False),
        ([RED, "Which? "], False),
        ([" Which? ", RED, "\n"], True),
    ):
        assert branch.continues([Message("user", first), branch.messages[1], more], ()) is is_same


def test_images_of_requests_are_read_to_the_end_and_stored(tmp_path, tiny_model):
    """And a name alone, which another run's image may have, is none."""
    renderer = make_renderer("chat", load_tokenizer(str(tiny_model)))
    spec = EnvSpec("Shows-v0", Shows)
    spec.store_images(ImageFolder(tmp_path))

    class NoSampler:
        def limit(self, max_tokens):
            pass

    noise = ImagePart.from_value(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    broken = ImagePart.from_value(noise.data[:-2000])
    conversation = Conversation(renderer, NoSampler(), None, None, spec)

    def answer(image):
        asyncio.run(conversation.answer((Message("user", ["Which?", image]),), (), 4))

    with pytest.raises(InvalidStep, match="the file of an image cannot be read"):
        answer(broken)
    with pytest.raises(InvalidStep, match="known here by its name alone"):
        answer(ImagePart(RED.sha256, 6, 4, "image/png"))
    assert not [*tmp_path.iterdir()]
    with pytest.raises(InvalidStep, match="has an image, and"):  # this model takes text alone
        answer(RED)
    assert [file.name for file in tmp_path.iterdir()] == [f"{RED.sha256}.png"]


class Shows(Env):
    async def reset(self, *, seed=None, options=None):
        return Observation((Message("user", ["Which?", RED]),)), {}

    async def step(self, action):
        return None, 1.0, True, False, {}


SENDS_BACK = """
    import json, sys
    from openai import BadRequestError, OpenAI

    given = json.load(sys.stdin)
    [text, image] = given["messages"][0]["content"]
    open(sys.argv[0] + ".seen", "w").write(image["image_url"]["url"])
    try:
        OpenAI(max_retries=0).chat.completions.create(model="any", messages=given["messages"])
    except BadRequestError as error:
        sys.exit(str(error))
"""


def test_a_program_gets_the_images_of_the_first_observation(tiny_model, tmp_path):
    renderer = make_renderer("chat", load_tokenizer(str(tiny_model)))
    command = program(tmp_path, SENDS_BACK)
    agent = External(renderer, ExternalConfig(command=command))
    runner = Runner(EnvSpec("Shows-v0", Shows), agent, Scripted(renderer, lambda *_: "red"),
                    RolloutConfig(retries=0, refills=0), max_model_len=512, seed=0, deterministic=False)  # fmt: skip
    sampling = SamplingParams(max_tokens=8, stop_token_ids=renderer.stop_token_ids)
    [group] = asyncio.run(runner.roll_out([Task("t")], SamplingPlan("p", sampling, 1)))
    content = base64.b64decode((tmp_path / "agent.py.seen").read_text().partition(",")[2])
    assert np.asarray(Image.open(io.BytesIO(content))).shape == (4, 6, 3)
    assert "has an image, and" in group.episodes[0].outcome.message  # this model takes text alone
