"""Which tokens of a recorded conversation are taught, on real templates: against masks made by hand."""

import asyncio
import json

import pytest

import envgym
from envgym.agents.replay import Replay, ReplayConfig
from envgym.env import CheckedEnv

THOUGHT = "<think>\nI add.\n</think>\n\n3"
TALK = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 1?"},
    {"role": "assistant", "content": "4"},
]
THINKING_TALK = [TALK[0], {"role": "assistant", "content": THOUGHT}, *TALK[2:]]

CHATML = "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
CHATML_AGAIN = "\n<|im_start|>user\nAnd 1?<|im_end|>\n<|im_start|>assistant\n"
QWEN3_LAST = "⟦<think>\n\n</think>\n\n4<|im_end|>⟧"
BY_HAND = [
    ("starter", "chatml", TALK, "all", [f"{CHATML}⟦3<|im_end|>⟧{CHATML_AGAIN}⟦4<|im_end|>⟧"]),
    ("tekken", "chatml", TALK, "last", [f"{CHATML}3<|im_end|>{CHATML_AGAIN}⟦4<|im_end|>⟧"]),
    # Tekken's own has no token between the end of a turn and the next instruction.
    ("tekken", "own", TALK, "all", ["<s>[INST]1 + 2?[/INST]⟦3</s>⟧[INST]And 1?[/INST]⟦4</s>⟧"]),
    # Qwen 3 drops the thoughts of earlier turns: what was said after each turn is a row of its own, as it is when the
    # model is used.
    (
        "tekken", "qwen3", THINKING_TALK, "all",
        [f"{CHATML}⟦{THOUGHT}<|im_end|>⟧", f"{CHATML}3<|im_end|>{CHATML_AGAIN}{QWEN3_LAST}"],
    ),
    ("tekken", "qwen3", THINKING_TALK, "last", [f"{CHATML}3<|im_end|>{CHATML_AGAIN}{QWEN3_LAST}"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "family", "talk", "teach", "expected"), BY_HAND)
def test_the_assistants_turns_with_their_ends_and_nothing_else(chat, tmp_path, name, family, talk, teach, expected):
    renderer = chat(name, family)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk}))

    async def rows():
        data = {"path": str(path), "test_fraction": 0}
        async with envgym.spec("recorded", data=data, teach=teach) as spec, spec.make() as env:
            task = await spec.tasks("train").get(0)
            agent = Replay(renderer, ReplayConfig())
            return (await agent.replay(CheckedEnv(env, spec), task, seed=0, recording_index=0)).rows

    said = []
    for row in asyncio.run(rows()):
        text = ""
        for segment in row.segments:
            part = renderer.tokenizer.decode(segment.token_ids)
            text += f"⟦{part}⟧" if segment.role == "action" else part
            assert set(segment.loss_weights) == ({1.0} if segment.role == "action" else {0.0})
        said.append(text)
    assert said == expected
