"""Every environment that ships with envgym, and every example, passes its own check."""

import asyncio
import json
import re
import shutil
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from aiohttp import web

from envgym.check import CheckVerdict, check_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHIPPED = sorted(entry.name for entry in entry_points(group="envgym.envs") if entry.value.startswith("envgym."))
QUICK = {"judge-v0"}
"""One that needs a service. The others are slow."""
NEED = {
    "judge-v0": lambda url: {"judge": {"base_url": f"{url}/v1", "model": "m"}},
    "reward_model-v0": lambda url: {"endpoints": f"{url}/get_reward"},
    "nemo_gym-v0": lambda url: {"url": url},
    "mixture-v0": lambda url: {"members": {"sums": "math_verify", "ice": {"env": "gymnasium", "weight": 2}}},
}
"""Settings that those need which cannot be played without any, given a server of judgements."""
TAKE_DATA = {
    "function_calls-v0", "instruction_following-v0", "judge-v0", "multiple_choice-v0", "process_reward_model-v0",
    "recorded-v0", "reward_model-v0", "nemo_gym-v0",
}  # fmt: skip


async def judgement(request):
    """Serves a judge, a reward model and a resources server, who know the right answer when they see it."""
    if request.method != "POST":
        return web.Response(status=405)
    body = await request.json()
    if request.path == "/seed_session":
        return web.json_response({})
    if request.path == "/verify":
        said = body["response"]["output"][-1]["content"][0]["text"]
        return web.json_response({"reward": float(said.strip() == body["answer"])})
    if "query" in body:
        pairs = zip(body["query"], body["labels"], strict=True)
        return web.json_response({"rewards": [float(query.endswith(label)) for query, label in pairs]})
    content = body["messages"][0]["content"]
    reference = re.search(r"^----- reference answer (\w+) -----\n(.*?)\n----- end", content, re.M | re.S).group(2)
    answer = re.search(r"^----- answer (\w+) -----\n(.*?)\n----- end", content, re.M | re.S).group(2)
    return web.json_response(
        {"choices": [{"message": {"content": f'{{"score": {10 * (answer.strip() == reference)}}}'}}]}
    )


def data(folder, name):
    rows = [{"prompt": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in range(20, 60)]
    for a, row in enumerate(rows):
        row["choices"] = [int(row["answer"]) + (k - a) % 4 for k in range(4)]
    rows = [{**row, "responses_create_params": {"input": row["prompt"]}} for row in rows]
    for row in rows:
        short = {"relation": "less than", "num_words": 9}  # else a text with all numbers follows every instruction
        row["instruction_id_list"] = ["keywords:existence", "length_constraints:number_words"]
        row["kwargs"] = [{"keywords": [row["answer"]]}, short]
    if name == "function_calls-v0":
        number = {"type": "dict", "properties": {"number": {"type": "string"}}, "required": ["number"]}
        functions = [{"name": "math.say", "description": "Say a number.", "parameters": number}]
        rows = [row | {"functions": functions, "answer": [{"math.say": {"number": [row["answer"]]}}]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": {"path": str(folder / "rows.jsonl")}}


def process_reward_model(reward_model, folder):
    """The same model as the recipe `prm` leaves one."""
    copy = shutil.copytree(reward_model, folder / "prm")
    described = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**described, "reward_at": "end_of_turn"}))
    return copy


def settings_of(id, url, folder, reward_model):
    """What an environment needs besides its data, given the server of judgements and a reward model."""
    if id == "process_reward_model-v0":
        return {"model": str(process_reward_model(reward_model, folder))}
    return NEED[id](url) if id in NEED else {}


def problems(report):
    return "\n".join(str(finding) for finding in report.findings if finding.verdict is CheckVerdict.FAILED)


@pytest.mark.parametrize("id", [id if id in QUICK else pytest.param(id, marks=pytest.mark.slow) for id in SHIPPED])
def test_what_ships_passes(id, tmp_path, serving, tiny_reward_model):
    async def examine():
        async with serving(judgement) as url:
            settings = settings_of(id, url, tmp_path, tiny_reward_model)
            return await check_environment(id, settings | (data(tmp_path, id) if id in TAKE_DATA else {}))

    report = asyncio.run(examine())
    assert report.passed, problems(report)
    played = {"types", "seed", "generators", "isolation", "after the end", "close", "left behind"}
    assert {check: report.verdict(check) for check in played} == dict.fromkeys(played, CheckVerdict.OK)


@pytest.mark.slow
@pytest.mark.parametrize("example", [p for p in EXAMPLES.glob("*.py") if "(envgym.Env" in p.read_text()], ids=str)
def test_examples_pass(example):
    report = asyncio.run(check_environment(str(example)))
    assert report.passed, problems(report)


@pytest.mark.slow
def test_a_service_that_is_not_there_is_no_fault_of_the_environment(tmp_path):
    """Nothing answers at the judge's address: what needs its grades is not applicable, the rest is looked at."""
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "tries": 1}
    report = asyncio.run(check_environment("judge", {"judge": judge} | data(tmp_path, "judge-v0")))
    assert report.passed, problems(report)
    assert report.verdict("settings") is report.verdict("tasks") is report.verdict("splits") is CheckVerdict.OK
    (episodes,) = [finding for finding in report.findings if finding.check == "episodes"]
    assert episodes.verdict is CheckVerdict.NOT_APPLICABLE
    assert "127.0.0.1:9" in episodes.message
