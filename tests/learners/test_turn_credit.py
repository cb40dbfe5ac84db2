"""A two-turn bandit that only turn-level credit solves quickly: the machines of `examples/bandit.py`, a table for a
policy, and the real learners' `prepare` and `loss`."""

import asyncio
from pathlib import Path

import pytest
import torch

import envgym
from envgym.learner import Outputs, pad
from envgym.registry import load_component
from envgym.types import Action, Episode, Group, Outcome, Row, Segment, Task, Turn, number_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "bandit.py"
ARMS = "abcdefgh"
PLACES = [1, 3]
"""Of the two pulls, in a row of a prompt's token, a pull, a feedback's token and a pull."""
RIGHT = ARMS.index("c")


async def play(env, arms, seed):
    """One episode in which these arms are pulled, as an agent would record it."""
    await env.reset(seed=seed)
    paid = []
    for arm in arms:
        _, reward, terminated, _, _ = await env.step(Action(ARMS[arm]))
        paid.append(reward)
    assert terminated
    first, second = (Segment("action", [arm], logprobs=[0.0]) for arm in arms)
    segments = [Segment("prompt", [9]), first, Segment("feedback", [8]), second]
    row = Row(segments, turns=[Turn(reward, "stop") for reward in paid])
    return Episode("e", Task(str(seed)), Outcome.finish(), rows=[row], reward=sum(paid))


def said(table, token_ids):
    """[B, T] log-probabilities and entropies of rows under a policy of a table of logits [turn, arm]."""
    logs = table.log_softmax(1)
    logprobs, entropies = torch.zeros(token_ids.shape), torch.zeros(token_ids.shape)
    for turn, place in enumerate(PLACES):
        logprobs[:, place] = logs[turn][token_ids[:, place]]
        entropies[:, place] = -(logs[turn].exp() * logs[turn]).sum()
    return logprobs, entropies


async def train(name, credit, *, steps, seed):
    """The chance of the second machine's right arm after `steps` steps of 4 groups of 8 episodes."""
    kind = load_component("learner", name)
    learner = kind(kind.Config(name=name, credit=credit, constant_length=2))
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(2, len(ARMS), requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    env = envgym.make(str(EXAMPLE))
    for step in range(steps):
        groups = []
        for task in range(4):
            with torch.no_grad():
                pulls = torch.multinomial(table.softmax(1), 8, replacement=True, generator=generator).T.tolist()
            problem = (seed * steps + step) * 4 + task
            groups.append(Group("g", Task("t"), [await play(env, arms, problem) for arms in pulls]))
        rows = learner.prepare(number_rows(groups))
        batch = pad(rows, torch.device("cpu"))
        logprobs, entropy = said(table, batch.token_ids)
        batch.old_logprobs = torch.where(batch.old_logprobs.isnan(), batch.old_logprobs, logprobs.detach())
        loss, _ = learner.loss(
            "actor", Outputs(logprobs=logprobs, entropy=entropy), batch, learner.loss_normalizers(rows)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return table.softmax(1)[1, RIGHT].item()


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "reinforce++"])
def test_only_turn_level_credit_solves_it_quickly(name):
    """In 40 steps of 32 episodes, from a chance of 1/8. The first machine's luck, which teaches nothing, is ten times
    what the second has to say."""
    chances = {
        credit: [asyncio.run(train(name, credit, steps=40, seed=seed)) for seed in range(3)]
        for credit in ("turn", "episode")
    }
    assert min(chances["turn"]) > 0.9, chances
    assert max(chances["episode"]) < 0.6, chances
