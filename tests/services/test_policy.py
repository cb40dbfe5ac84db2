"""The policy in training as a service: rendered and sampled as the run does it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import envgym
from envgym.engine import Request, SamplingParams
from envgym.engines.pool import EngineClient
from envgym.engines.spec import EngineSpec
from envgym.errors import InvalidOutcome, PromptTooLong
from envgym.processes.runtime import InlineRuntime
from envgym.render import load_tokenizer, make_renderer
from envgym.services import Policy, start_services
from envgym.services.policy import LOCKSTEP, PolicyEngine
from envgym.transcript import LockstepBatcher
from envgym.types import Message

MESSAGES = [{"role": "system", "content": "Play."}, {"role": "user", "content": "what is 12 + 34?"}]


class Spec(envgym.EnvSpec):
    @property
    def services(self):
        return {"opponent": Policy()}


def with_policy(tiny_model, body, *, deterministic=False):
    """Run `body(client, engine, renderer)` with the policy of a real engine."""

    async def main():
        runtime = InlineRuntime()
        arguments = {"spec": EngineSpec(str(tiny_model), deterministic=deterministic)}
        target = "envgym.engines.transformers:TransformersEngine"
        engine = EngineClient(await runtime.start(target, arguments, name="engine"))
        renderer = make_renderer("chat", load_tokenizer(str(tiny_model)))
        spec = Spec("game")
        try:
            async with start_services(spec, runtime) as services:
                client = spec.clients["opponent"]
                with pytest.raises(InvalidOutcome, match="is the policy in training, which no engine samples here"):
                    await client.complete(MESSAGES)
                services.bind_policy(PolicyEngine(renderer, engine, 512, deterministic, seed=3))
                result = await body(client, engine, renderer)
                assert services.counters["opponent/requests"] == client.counters["requests"] > 0
                return result
        finally:
            await runtime.close()

    return asyncio.run(main())


def test_it_says_what_the_engine_samples_from_the_runs_own_rendering(tiny_model):
    async def body(client, engine, renderer):
        text = await client.complete(MESSAGES, max_tokens=12, temperature=0.0)
        prompt = renderer.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        ids = tuple(renderer.tokenizer.encode(prompt, add_special_tokens=False))
        direct = await engine.generate(Request("x", ids, SamplingParams(12, temperature=0.0)))
        assert text == renderer.text(direct.token_ids)
        with pytest.raises(PromptTooLong, match="service opponent: a prompt of"):
            await client.complete("12 + 34 " * 200)
        return text

    assert with_policy(tiny_model, body)


def test_special_tokens_in_its_questions_are_characters(tiny_model):
    """A question quotes what the policy has played."""

    async def body(client, engine, renderer):
        asked = []

        class Listening:
            async def generate(self, request):
                asked.append([token for token in request.token_ids if token in renderer.added_tokens])
                return await engine.generate(request)

        client._bound = replace(client._bound, engine=Listening())
        for text in ("plain", "<|im_end|><|im_start|>"):
            await client.complete([{"role": "user", "content": text}, *MESSAGES[1:]], max_tokens=4)
        return asked

    plain, spelled = with_policy(tiny_model, body)
    assert plain == spelled


def test_pictures_in_a_question_are_sampled_after_and_distinguish_it(tiny_model, vision_model):
    """A deterministic run seeds a request by its content."""

    async def body(client, engine, _):
        asked = []

        class Listening:
            async def generate(self, request):
                asked.append(request)
                return await engine.generate(Request(request.id, request.token_ids[:3], SamplingParams(2)))

        renderer = make_renderer("chat", load_tokenizer(str(vision_model("qwen2_vl"))))
        client._bound = replace(client._bound, engine=Listening(), renderer=renderer)
        for level in (0, 0, 255):
            await client.complete([Message.user("Who wins?", np.full((56, 56, 3), level, np.uint8))], max_tokens=4)
        return asked

    first, again, other = with_policy(tiny_model, body, deterministic=True)
    assert first.token_ids == other.token_ids
    assert (first.images, first.sampling) == (again.images, again.sampling)
    assert first.images[0].start == other.images[0].start > 0
    assert first.images[0].image != other.images[0].image
    assert first.sampling.seed != other.sampling.seed


def test_a_seed_makes_an_answer_repeatable(tiny_model):
    async def body(client, engine, renderer):
        return await asyncio.gather(
            *(client.complete(MESSAGES, max_tokens=12, seed=seed) for seed in (1, 1, 2)),
            *(client.complete(MESSAGES, max_tokens=12) for _ in range(2)),
        )

    first, again, other, *unseeded = with_policy(tiny_model, body)
    assert first == again != other
    assert unseeded[0] != unseeded[1]
    *_, once, twice = with_policy(tiny_model, body, deterministic=True)
    assert once == twice


def test_in_a_deterministic_run_it_is_part_of_the_waves(tiny_model):
    async def body(client, engine, renderer):
        waves = LockstepBatcher(engine, 2, 2)
        LOCKSTEP.set(waves)
        first = asyncio.create_task(client.complete(MESSAGES, max_tokens=4))
        done, _ = await asyncio.wait({first}, timeout=0.2)
        assert not done  # it waits for the other episode
        await asyncio.gather(first, client.complete("other", max_tokens=4))

    with_policy(tiny_model, body, deterministic=True)
