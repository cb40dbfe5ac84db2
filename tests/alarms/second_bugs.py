"""Second forms of the twelve kinds of bugs, by somebody who has not read the alarms.

Each is a mistake that a good engineer could make; its docstring says what they had in mind. Import this module, then
run `bugs.run_bug(NAME, SEED, FOLDER)`.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.alarms.bugs import GUESSES, bug


@bug("feedback tokens in the loss", *GUESSES, "learner.old_logprobs=recompute")
def the_line_break_after_a_turn_is_the_policys(patch: pytest.MonkeyPatch) -> None:
    """The template ends an assistant's turn with `<|im_end|>` and a line break, so both are recorded as the turn's."""
    from envgym.transcript import Transcript
    from envgym.types import Segment

    add_feedback = Transcript.add_feedback

    def add_feedback_after_the_turns_end(self: Any, token_ids: Any, images: Any = ()) -> None:
        ids = list(token_ids)
        row = self.rows[-1]
        if ids and not images and row.segments[-1].role == "action":
            self._append(Segment("action", ids[:1]))  # the line break; not sampled, so without log-probabilities
            ids = ids[1:]
        add_feedback(self, ids, images)

    patch.setattr(Transcript, "add_feedback", add_feedback_after_the_turns_end)


@bug("stale weights in the engine", *GUESSES)
def cached_prompts_outlive_their_weights(patch: pytest.MonkeyPatch) -> None:
    """Prompts that come again need no second forward pass: their keys and values are cached. Nobody clears the cache
    when new weights arrive."""
    from envgym.engines.transformers import TransformersEngine

    forward = TransformersEngine._forward
    prompts: dict[tuple[tuple[int, ...], ...], Any] = {}

    def forward_with_cached_prompts(self: Any, batch: Any, cache: Any, mask: Any) -> Any:
        if mask is not None or any(sample.token_ids for sample in batch):
            return forward(self, batch, cache, mask)
        key = tuple(tuple(sample.sequence) for sample in batch)
        if key not in prompts:
            prompts[key] = copy.deepcopy(forward(self, batch, cache, mask))
        return copy.deepcopy(prompts[key])

    patch.setattr(TransformersEngine, "_forward", forward_with_cached_prompts)


@bug("top-p left out of the log-probabilities", "rollout.top_p=0.8")
def logprobs_are_the_models_own(patch: pytest.MonkeyPatch) -> None:
    """The engine returns log-probabilities of the model's distribution, before top-p, as vLLM does by default."""
    import torch

    from envgym.engines import transformers as engine

    sample_token = engine.sample_token

    def sample_token_with_raw_logprob(logits: Any, sampling: Any, generator: Any) -> tuple[Any, Any]:
        raw = torch.log_softmax(logits, -1)
        token, _ = sample_token(logits, sampling, generator)
        return token, raw[token]

    patch.setattr(engine, "sample_token", sample_token_with_raw_logprob)


@bug("long episodes lost", *GUESSES)
def a_group_is_its_first_finishers(patch: pytest.MonkeyPatch) -> None:
    """Against stragglers, each group starts one member more than it needs, and keeps those that finish first."""
    from envgym.rollout.runner import Runner

    run_members = Runner._run_members

    async def run_one_more(self: Any, members: Any, plan: Any, tally: Any) -> None:
        members = list(members)
        groups = {group.id: group for group, _ in members}
        tally.total += len(groups)
        await run_members(self, [*members, *((group, plan.samples) for group in groups.values())], plan, tally)
        for group in groups.values():  # in the order in which they finished
            del group.episodes[plan.samples :]

    patch.setattr(Runner, "_run_members", run_one_more)


@bug("an advantage's sign")
def the_ratio_is_upside_down(patch: pytest.MonkeyPatch) -> None:
    """The ratio is computed as old / new: its value is right where the two are equal, but not its slope."""
    from envgym.learners.losses import ClippedRatio

    losses = ClippedRatio.losses

    def losses_of_old_minus_new(self: Any, log_ratio: Any, logprobs: Any, advantages: Any, config: Any) -> Any:
        return losses(self, -log_ratio, logprobs, advantages, config)

    patch.setattr(ClippedRatio, "losses", losses_of_old_minus_new)


@bug("a reward counted twice")
def the_score_is_a_bonus(patch: pytest.MonkeyPatch) -> None:
    """The environment's score is added to the reward as a bonus for success; but it is the reward already."""
    from envgym.learners import policy_gradient

    shaped_reward = policy_gradient.shaped_reward

    def reward_with_bonus(episode: Any, config: Any) -> float:
        return shaped_reward(episode, config) + (episode.score or 0.0)

    patch.setattr(policy_gradient, "shaped_reward", reward_with_bonus)


@bug("the end token never learned")
def nothing_follows_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """Labels are shifted by one in mind: the last token, which has no next one, gets no weight, like the first.

    (Its first version was in `Row.loss_weights`, also that of the probe before the first sync, which stopped the run.)
    """
    from envgym.learners.policy_gradient import PolicyGradient

    action_tokens = PolicyGradient._action_tokens

    def action_tokens_with_a_next(self: Any, episode: Any) -> Any:
        for row in episode.rows:
            row.loss_weights[-1:] = 0.0
        return action_tokens(self, episode)

    patch.setattr(PolicyGradient, "_action_tokens", action_tokens_with_a_next)


@bug("a template that drifts between turns", *GUESSES)
def new_messages_are_rendered_alone(patch: pytest.MonkeyPatch) -> None:
    """Later messages go through the template by themselves, and not behind the conversation: so the line break that
    it writes after `<|im_end|>` is missing."""
    from envgym.render.chat import ChatDialogue

    extend = ChatDialogue._extend

    def extend_by_new_messages(self: Any, observation: Any) -> Any:
        extension = extend(self, observation)
        if extension.fork or extension.images:
            return extension
        text = self._template.render(self._template.to_template(observation.messages), ())
        return replace(extension, token_ids=self.renderer.encode_after(self._last, text))

    patch.setattr(ChatDialogue, "_extend", extend_by_new_messages)


@bug("the wrong tokenizer")
def the_tokenizer_has_lost_its_merges(patch: pytest.MonkeyPatch) -> None:
    """A conversion of the tokenizer keeps its vocabulary and loses its merges: texts become single bytes."""
    from tokenizers import Tokenizer

    import envgym.render
    from envgym.render import renderer

    load_tokenizer = renderer.load_tokenizer

    def load_converted(model: str) -> Any:
        tokenizer = load_tokenizer(model)
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        described["model"]["merges"] = []
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
        return tokenizer

    assert envgym.render.load_tokenizer is load_tokenizer
    for module in [*sys.modules.values()]:
        if vars(module).get("load_tokenizer") is load_tokenizer:
            patch.setattr(module, "load_tokenizer", load_converted)


@bug("wrong denominators", "learner.minibatches=2")
def minibatches_share_a_denominator(patch: pytest.MonkeyPatch) -> None:
    """The denominator is computed once per rollout, and not once per optimizer step."""
    from envgym.learners.policy_gradient import PolicyGradient

    prepare, loss_normalizers = PolicyGradient.prepare, PolicyGradient.loss_normalizers
    prepared: list[Any] = []

    def prepare_and_keep(self: Any, groups: Any) -> Any:
        prepared[:] = prepare(self, groups)
        return list(prepared)

    def normalizers_of_the_rollout(self: Any, rows: Any) -> Any:
        return loss_normalizers(self, prepared or rows)

    patch.setattr(PolicyGradient, "prepare", prepare_and_keep)
    patch.setattr(PolicyGradient, "loss_normalizers", normalizers_of_the_rollout)


@bug("a filter that selects by length", "rollout.filter.zero_variance=true")
def short_answers_are_degenerate(patch: pytest.MonkeyPatch) -> None:
    """Groups with an answer of at most four tokens are dropped with those without variance, as degenerate ones."""
    from envgym.rollout import buffer

    drop_reason = buffer.drop_reason

    def drop_reason_or_short(config: Any, members: Any) -> str:
        return drop_reason(config, members) or ("degenerate" if min(e.n_action_tokens for e in members) <= 4 else "")

    patch.setattr(buffer, "drop_reason", drop_reason_or_short)


@bug("a reward read wrongly from text")
def the_last_number_will_do(patch: pytest.MonkeyPatch) -> None:
    """Where there is no box, the last number of the text is read: the policy is asked for a box, and is rewarded
    without one."""
    from envgym.envs.math_verify import MathVerify
    from envgym.envs.math_verify.prose import last_number

    final_answer = MathVerify.final_answer

    def final_answer_anywhere(self: Any, completion: str, gold: str) -> str | None:
        return final_answer(self, completion, gold) or last_number(completion)

    patch.setattr(MathVerify, "final_answer", final_answer_anywhere)
