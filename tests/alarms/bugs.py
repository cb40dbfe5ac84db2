"""Bugs that are put into a run, each in a place that its alarm does not read: a table to which forms can be added.

A bug is a function that patches the code of the run's process (`debug=true` runs all of it in one). The product has no
switch for any of them. To add a form: write such a function, and give it its kind with `@bug(KIND)`; `ALARMS` has the
alarms that name a kind. `python -m tests.alarms.bugs [NAME …] [SEED …]` runs those that are not stored yet.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "results" / "bugs.json"
SUMS = ("--env", "math_verify")
"""The main job: sums, in one turn."""
GUESSES = ("--env", str(ROOT / "examples" / "guess.py") + ":Guess")
"""A game of several turns."""
COMMON = (
    "eval.every=0", "debug=true", "engine.kind=transformers", "rollout.tasks_per_step=8", "rollout.group_size=4",
)  # fmt: skip
STEPS = 5
SEEDS = (11, 12, 13)

ALARMS = {
    "feedback tokens in the loss": {"feedback_in_loss", "feedback_as_answer"},
    "stale weights in the engine": {"stale_weights", "stale_samples", "stale_versions"},
    "top-p left out of the log-probabilities": {"sampling_distribution", "sampling_surprise"},
    "long episodes lost": {"lost_episodes", "missing_groups", "untrained_tokens", "unpushed_tokens"},
    "an advantage's sign": {"advantage_sign"},
    "a reward counted twice": {"reward_twice", "episode_twice", "return_twice"},
    "the end token never learned": {"end_not_learned"},
    "a template that drifts between turns": {"template_drift", "context_drift"},
    "the wrong tokenizer": {"wrong_tokenizer", "foreign_vocabulary"},
    "wrong denominators": {"wrong_denominator"},
    "a filter that selects by length": {"filter_by_length", "missing_groups"},
    "a reward read wrongly from text": {"misread_answers", "misgraded_answers"},
}
"""The alarms that name each kind of bug."""

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """A form of a kind of bug: the function that puts it in, and the words of the run that has it."""

    kind: str
    name: str
    patch: Patch
    words: tuple[str, ...]


BUGS: dict[str, Bug] = {}


def bug(kind: str, *words: str) -> Callable[[Patch], Patch]:
    """Register a form of a kind; its run is the main job unless `words` name an environment."""
    assert kind in ALARMS, kind

    def register(patch: Patch) -> Patch:
        BUGS[patch.__name__] = Bug(kind, patch.__name__, patch, words if "--env" in words else (*SUMS, *words))
        return patch

    return register


@dataclass(frozen=True, slots=True)
class Result:
    """The alarms that a run raised, with their steps and texts; the error that ended it, if any; its training steps,
    in all stages."""

    alarms: tuple[tuple[int, str, str], ...]
    error: str = ""
    steps: int = 0

    def names(self, kind: str) -> list[tuple[int, str]]:
        return [(step, name) for step, name, _ in self.alarms if name in ALARMS[kind] and step <= STEPS]


def run(words: Sequence[str], folder: Path, *, steps: int = STEPS, seed: int = 0, patch: Patch | None = None) -> Result:
    """Train with a patch, in a new folder, and read what it raised."""
    from envgym.cli import main
    from envgym.monitoring.alarms import metric_and_sentence

    place = Path(tempfile.mkdtemp(dir=folder))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(place)
        if patch is not None:
            patch(monkeypatch)
        status = main(["train", "--name", "run", f"steps={steps}", f"seed={seed}", *COMMON, *words])
    raised, n_steps = [], 0
    for file in sorted((place / "runs" / "run").rglob("metrics.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            n_steps += record["step"] > 0
            for name in record.get("alarms", []):
                raised.append((record["step"], name, (metric_and_sentence(name, record) or ("", ""))[1]))
    summary = place / "runs" / "run" / "summary.json"
    error = json.loads(summary.read_text()).get("error", "") if status and summary.exists() else ""
    shutil.rmtree(place)
    return Result(tuple(raised), error or (f"exit status {status}" if status else ""), n_steps)


def run_bug(name: str, seed: int, folder: Path) -> Result:
    form = BUGS[name]
    return run(form.words, folder, seed=seed, patch=form.patch)


# -- feedback tokens in the loss ------


@bug("feedback tokens in the loss", *GUESSES, "learner.old_logprobs=recompute")
def feedback_has_weight(patch: pytest.MonkeyPatch) -> None:
    """The transcript gives feedback the weight 1."""
    import envgym.transcript as module

    Segment = module.Segment

    def segment(role: str, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        made = Segment(role, token_ids, *args, **kwargs)
        return Segment(role, token_ids, [1.0] * len(made), **kwargs) if role == "feedback" else made

    patch.setattr(module, "Segment", segment)


@bug("feedback tokens in the loss", *GUESSES, "learner.old_logprobs=recompute")
def mask_of_all_after_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """The worker masks the prompt alone: what follows counts, with the advantage of its episode."""
    import numpy as np

    import envgym.workers.group as module

    sort = module.micro_batches

    def micro_batches(samples: Any, *args: Any, **kwargs: Any) -> Any:
        for row in samples:
            counted = np.flatnonzero(row.loss_weights)
            if len(counted):
                row.loss_weights = row.loss_weights.copy()
                row.loss_weights[counted[0] :] = row.loss_weights[counted[0]]
                row.arrays["advantages"] = np.full_like(row.loss_weights, row.arrays["advantages"][counted[0]])
        return sort(samples, *args, **kwargs)

    patch.setattr(module, "micro_batches", micro_batches)


# -- stale weights in the engine ------


@bug("stale weights in the engine")
def buckets_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """The engine takes the weights' files, and its model keeps the old ones."""
    from envgym.engines.transformers import TransformersEngine

    async def load_bucket(self: Any, bucket: Any) -> None:
        self._update.take(bucket)

    patch.setattr(TransformersEngine, "load_bucket", load_bucket)


@bug("stale weights in the engine")
def sampling_has_a_copy_of_the_model(patch: pytest.MonkeyPatch) -> None:
    """The engine samples with a copy of its first model; it scores texts with the new one."""
    from envgym.engines.transformers import TransformersEngine

    forward = TransformersEngine._forward

    def stale(self: Any, *args: Any) -> Any:
        model = self._model
        self._first = getattr(self, "_first", None) or copy.deepcopy(model)
        self._model = self._first
        try:
            return forward(self, *args)
        finally:
            self._model = model

    patch.setattr(TransformersEngine, "_forward", stale)


# -- top-p left out of the log-probabilities ------


@bug("top-p left out of the log-probabilities", "rollout.tasks_per_step=64")
def the_engine_has_a_top_p_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """The engine samples with top-p 0.8, and returns log-probabilities without it."""
    import envgym.engines.transformers as module

    sample_token = module.sample_token

    def sample(logits: Any, sampling: Any, generator: Any) -> Any:
        token, _ = sample_token(logits, replace(sampling, top_p=0.8), generator)
        return token, (logits / sampling.temperature).log_softmax(-1)[token]

    patch.setattr(module, "sample_token", sample)


@bug("top-p left out of the log-probabilities", "rollout.temperature=0.7")
def the_record_has_no_temperature(patch: pytest.MonkeyPatch) -> None:
    """Turns are recorded as if they were sampled at temperature 1, so that the trainer leaves the temperature out."""
    from envgym.transcript import Transcript

    record = Transcript.record
    patch.setattr(Transcript, "record", lambda self, generation, temperature: record(self, generation, 1.0))


# -- long episodes lost ------


@bug("long episodes lost")
def the_buffer_loses_the_longest(patch: pytest.MonkeyPatch) -> None:
    """The buffer removes the longest member of every third group."""
    from envgym.rollout.buffer import Buffer

    add, count = Buffer.add, itertools.count()

    def lose(self: Any, groups: Any) -> int:
        shorter = []
        for group in groups:
            episodes = sorted(group.episodes, key=lambda episode: episode.n_action_tokens)
            shorter.append(replace(group, episodes=episodes[:-1]) if next(count) % 3 == 0 else group)
        return add(self, shorter)

    patch.setattr(Buffer, "add", lose)


@bug("long episodes lost")
def long_rows_are_not_prepared(patch: pytest.MonkeyPatch) -> None:
    """The learner leaves out the longest eighth of the rows."""
    from envgym.learners.grpo import GRPO

    prepare = GRPO.prepare

    def shorten(self: Any, groups: Any) -> Any:
        rows = prepare(self, groups)
        limit = sorted(row.n_action_tokens for row in rows)[-len(rows) // 8]
        return [row for row in rows if row.n_action_tokens < limit] or rows

    patch.setattr(GRPO, "prepare", shorten)


# -- an advantage's sign ------


@bug("an advantage's sign")
def mean_minus_reward(patch: pytest.MonkeyPatch) -> None:
    from envgym.learners.grpo import GRPO

    advantages = GRPO.advantages
    patch.setattr(GRPO, "advantages", lambda self, rewards: [-value for value in advantages(self, rewards)])


@bug("an advantage's sign")
def loss_is_not_negated(patch: pytest.MonkeyPatch) -> None:
    from envgym.learners.losses import ClippedRatio

    losses = ClippedRatio.losses

    def ascend(self: Any, log_ratio: Any, logprobs: Any, advantages: Any, config: Any) -> Any:
        return losses(self, log_ratio, logprobs, -advantages, config)

    patch.setattr(ClippedRatio, "losses", ascend)


# -- a reward counted twice ------


@bug("a reward counted twice")
def the_last_reward_is_added_again(patch: pytest.MonkeyPatch) -> None:
    """The transcript adds the last turn's reward to the sum once more."""
    from envgym.transcript import Transcript

    episode = Transcript.episode

    def add_again(self: Any, task: Any, outcome: Any) -> Any:
        result = episode(self, task, outcome)
        if result.reward is not None and result.rows:
            result.reward += result.rows[-1].turns[-1].reward or 0.0
        return result

    patch.setattr(Transcript, "episode", add_again)


@bug("a reward counted twice", *GUESSES, "learner.credit=turn")
def turns_get_the_whole_reward(patch: pytest.MonkeyPatch) -> None:
    """The learner adds the episode's reward to that of the last turn, which has it already."""
    from envgym.learners.advantages import ActionTokens

    make = ActionTokens.from_episode.__func__

    def twice(cls: Any, episode: Any, reward: float, credit: str) -> Any:
        tokens = make(cls, episode, reward, credit)
        tokens.rewards[-1] += reward
        return tokens

    patch.setattr(ActionTokens, "from_episode", classmethod(twice))


# -- the end token never learned ------


@bug("the end token never learned")
def the_end_is_taken_for_padding(patch: pytest.MonkeyPatch) -> None:
    """The worker masks every end-of-turn token, as if it was padding."""
    import envgym.workers.learning as module

    pad = module.pad

    def mask(rows: Any, *args: Any) -> Any:
        batch = pad(rows, *args)
        end = max({int(row.token_ids[-1]) for row in rows}, key=[int(row.token_ids[-1]) for row in rows].count)
        batch.loss_weights[batch.token_ids == end] = 0.0
        return batch

    patch.setattr(module, "pad", mask)


@bug("the end token never learned")
def turns_are_recorded_without_their_end(patch: pytest.MonkeyPatch) -> None:
    """The transcript drops the last token of a turn that ended by itself."""
    from envgym.transcript import Transcript
    from envgym.types import StopReason, VersionSpan

    record = Transcript.record

    def drop(self: Any, generation: Any, temperature: float) -> None:
        n = len(generation.token_ids) - 1
        if generation.stop_reason is StopReason.STOP and n:
            spans = (VersionSpan(generation.versions[0].version, 0, n),)
            generation = replace(
                generation, token_ids=generation.token_ids[:n], logprobs=generation.logprobs[:n], versions=spans
            )
        record(self, generation, temperature)

    patch.setattr(Transcript, "record", drop)


# -- a template that drifts between turns ------


@bug("a template that drifts between turns", *GUESSES)
def later_turns_begin_in_another_way(patch: pytest.MonkeyPatch) -> None:
    """After the first turn the template leaves out the line break before the policy's turn."""
    from envgym.render.chat import Template

    render = Template.render

    def drift(self: Any, messages: Any, tools: Any = (), *, open_turn: bool = True) -> str:
        text = render(self, messages, tools, open_turn=open_turn)
        has_turns = any(message["role"] == "assistant" for message in messages)
        return text.rstrip("\n") if open_turn and has_turns else text

    patch.setattr(Template, "render", drift)


@bug("a template that drifts between turns", *GUESSES)
def the_engine_sees_another_context(patch: pytest.MonkeyPatch) -> None:
    """In later turns the engine is given the context without the first message's tokens."""
    from envgym.transcript import EpisodeSampler

    generate = EpisodeSampler.generate

    async def forget(self: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return await generate(self, token_ids[6:] if self.turn else token_ids, *args, **kwargs)

    patch.setattr(EpisodeSampler, "generate", forget)


# -- the wrong tokenizer ------


@bug("the wrong tokenizer")
def the_vocabulary_is_of_another_model(patch: pytest.MonkeyPatch) -> None:
    """The run's tokenizer has the same tokens under other ids."""
    import envgym.jobs.components as module
    import envgym.render as render

    load = render.load_tokenizer

    def load_other(model: str) -> Any:
        from tokenizers import Tokenizer

        tokenizer = load(model)
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary, added = described["model"]["vocab"], {token["id"] for token in described["added_tokens"]}
        ids = [index for index in vocabulary.values() if index not in added]
        turned = dict(zip(ids, ids[7:] + ids[:7], strict=True))
        described["model"]["vocab"] = {text: turned.get(index, index) for text, index in vocabulary.items()}
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
        return tokenizer

    for place in (module, render, render.renderer, render.config):
        if hasattr(place, "load_tokenizer"):
            patch.setattr(place, "load_tokenizer", load_other)


@bug("the wrong tokenizer")
def texts_are_encoded_one_off(patch: pytest.MonkeyPatch) -> None:
    """Every token of an encoded text that is not an added one has the id of its neighbour."""
    from envgym.render.renderer import Renderer

    encode = Renderer.encode

    def shift(self: Any, text: str, **kwargs: Any) -> list[int]:
        ids = encode(self, text, **kwargs)
        return [index if index in self.added_tokens else max(index - 1, max(self.added_tokens) + 1) for index in ids]

    patch.setattr(Renderer, "encode", shift)


# -- wrong denominators ------


@bug("wrong denominators")
def loss_is_divided_by_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """The loss is divided by the tokens of the rows, prompts included, in place of the episodes."""
    from envgym.learners.policy_gradient import PolicyGradient

    normalizers = PolicyGradient.loss_normalizers

    def all_tokens(self: Any, rows: Any) -> Any:
        return dict.fromkeys(normalizers(self, rows), float(sum(map(len, rows))))

    patch.setattr(PolicyGradient, "loss_normalizers", all_tokens)


@bug("wrong denominators", "workers.tokens_per_microbatch=64", "learner.aggregation=token")
def each_micro_batch_has_its_mean(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch is divided by its own tokens, and their sum by their number."""
    from envgym.workers.learning import ModelLearning

    accumulate, loss = ModelLearning.accumulate, ModelLearning._loss

    def count(self: Any, microbatches: Any, *args: Any, **kwargs: Any) -> Any:
        self._n_microbatches = len(microbatches)
        return accumulate(self, microbatches, *args, **kwargs)

    def mean(self: Any, samples: Any, normalizers: Any, share: float) -> Any:
        own = {name: value * self._n_microbatches for name, value in self.learner.loss_normalizers(samples).items()}
        return loss(self, samples, normalizers | own, share)

    patch.setattr(ModelLearning, "accumulate", count)
    patch.setattr(ModelLearning, "_loss", mean)


# -- a filter that selects by length ------


@bug("a filter that selects by length", "rollout.filter.zero_variance=true")
def the_filter_drops_long_groups(patch: pytest.MonkeyPatch) -> None:
    """The filter takes groups with a long answer for ones of equal scores."""
    import envgym.rollout.buffer as module

    drop_reason = module.drop_reason

    def drop(config: Any, members: Any) -> str:
        is_long = max(episode.n_action_tokens for episode in members) > 8
        return "zero_variance" if is_long else drop_reason(config, members)

    patch.setattr(module, "drop_reason", drop)


@bug("a filter that selects by length")
def the_buffer_forgets_long_groups(patch: pytest.MonkeyPatch) -> None:
    """Without any filter, the buffer removes the group with the longest answers as it is filled."""
    from envgym.rollout.buffer import Buffer

    add = Buffer.add

    def forget(self: Any, groups: Any) -> int:
        n = add(self, groups)
        if len(self._groups) > 2:
            longest = max(self._groups, key=lambda group: sum(e.n_action_tokens for e in group.episodes))
            self._groups.remove(longest)
        return n

    patch.setattr(Buffer, "add", forget)


# -- a reward read wrongly from text ------


@bug("a reward read wrongly from text")
def the_first_digit_is_the_answer(patch: pytest.MonkeyPatch) -> None:
    """The environment reads the first digit of the box."""
    import envgym.envs.math_verify as module

    boxed = module.boxed

    def first_digit(*args: Any, **kwargs: Any) -> str | None:
        answer = boxed(*args, **kwargs)
        return answer[:1] if answer and answer[:1].isdigit() else answer

    patch.setattr(module, "boxed", first_digit)


@bug("a reward read wrongly from text", "rollout.tasks_per_step=32")
def a_right_beginning_is_enough(patch: pytest.MonkeyPatch) -> None:
    """The environment compares the first digits alone."""
    import envgym.envs.math_verify as module

    async def grade(self: Any, answer: str, gold: str, problem: str = "") -> Any:
        return module.Grade(answer.strip()[:1] == gold[:1])

    patch.setattr(module.MathVerify, "grade", grade)


def store(folder: Path, names: Sequence[str] = (), seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Run the forms of these names (all) at the seeds, but for those in `tests/results/bugs.json`, and store each there
    as it ends. Returns all that are stored."""
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    for name, seed in itertools.product(names or BUGS, seeds):
        if (key := f"{name} {seed}") in stored:
            continue
        result = run_bug(name, seed, folder)
        named = result.names(BUGS[name].kind)[:1]
        stored[key] = {
            "kind": BUGS[name].kind,
            "named": named[0] if named else None,
            "alarms": [alarm[:2] for alarm in result.alarms],
            "error": result.error,
        }
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
        print(f"## {key}: {json.dumps(stored[key])}", flush=True)
    return stored


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        words = sys.argv[1:]
        of_words = [int(word) for word in words if word.isdecimal()]
        store(Path(temporary), [word for word in words if not word.isdecimal()], of_words or SEEDS)
