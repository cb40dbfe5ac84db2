"""Laws: each number is right for a step as it should be, and tells of one that breaks it."""

from dataclasses import replace

import numpy as np
import pytest

from envgym.learner import Learner
from envgym.learners.grpo import GRPO, GRPOConfig
from envgym.monitoring.law_texts import Texts, misgraded_answers, misread_answers
from envgym.monitoring.laws import (
    Laws,
    denominators,
    end_learned_share,
    is_dropped,
    reward_error,
    sign_agreement,
    surprise_in_errors,
    turn_gaps,
    unsampled_share,
    version_lag,
)
from envgym.render import ChatRenderer, load_tokenizer
from envgym.rollout.config import FilterConfig
from envgym.training.weight_sync import sync_lag
from envgym.types import (
    Episode,
    Group,
    Message,
    Outcome,
    Row,
    Segment,
    StopReason,
    Tally,
    Task,
    Turn,
    VersionSpan,
    number_rows,
)

END = 0


def row_of(*turns, version=0, end=END):
    """A row of turns of so many tokens, the last of which ends the turn, each after three tokens of others."""
    segments = []
    for number, length in enumerate(turns):
        segments.append(Segment("feedback" if number else "prompt", [5, 6, 7]))
        ids, spans = [*range(10, 9 + length), end], (VersionSpan(version, 0, length),)
        segments.append(Segment("action", ids, logprobs=[-1.0] * length, versions=spans))
    row = Row(segments, turns=[Turn(0.0, StopReason.STOP) for _ in turns])
    row.turns[-1].reward = 1.0
    return row


def episode_of(number, reward, *turns, group="step-000001-0/00000", **fields):
    row = row_of(*turns)
    row.turns[-1].reward = reward
    values = {"reward": reward, "score": reward, "group_id": group, "member": number, "tally": Tally(reward)}
    return Episode(f"{group}:{number}", Task("t", "?"), Outcome.finish(), rows=[row], **{**values, **fields})


def group_of(*rewards, lengths=(3, 4, 5, 6), name="step-000001-0/00000"):
    members = [episode_of(n, reward, lengths[n], group=name) for n, reward in enumerate(rewards)]
    return Group(name, members[0].task, members)


def learned(groups, learner):
    """The rows of a right update, with the gradient that the learner's settings say."""
    rows = learner.prepare(number_rows(groups))
    episodes = {row.episode_index for row in rows}
    for row in rows:
        row.first_outputs, row.entropies = np.nan_to_num(row.old_logprobs), np.ones(len(row), np.float32)
        row.pushes = row.loss_weights * row.arrays["advantages"] / len(episodes)
    return rows


def pushed(rows):
    """Each row with its pushes."""
    return [(row, row.pushes) for row in rows]


@pytest.fixture
def learner():
    return GRPO(GRPOConfig(name="grpo"))


class Ends:
    """A renderer that knows the end of a turn."""

    def ends_turn(self, token):
        return token == END


def laws_of(learner, **options):
    return Laws(learner, Ends(), "no folder", **{"filter": None, "judges_groups": False, "samples": True, **options})


def test_a_right_step_keeps_every_law(learner):
    groups = [group_of(1.0, 0.0, 0.0, 1.0)]
    laws = laws_of(learner)
    record = laws.of_rollout(groups, groups, [], 4, 0)
    rows = learned(groups, learner)
    record |= laws.of_rows(rows, groups) | laws.of_first_pass(rows, 1e-6) | laws.of_update(rows, groups)
    assert {name: value for name, value in record.items() if value} == pytest.approx(
        {"laws/denominator": 1.0, "laws/sign": 1.0, "laws/end_learned_share": 1.0}
    )
    assert laws.take_seconds() > 0
    assert laws.take_seconds() == 0


def test_gradient_at_tokens_of_others_is_a_share_of_it(learner):
    [row] = learned([Group("g", Task("t"), [episode_of(0, 1.0, 3), episode_of(1, 0.0, 3)])], learner)[:1]
    row.pushes = np.ones(6, np.float32)
    assert unsampled_share([(row, row.pushes)]) == pytest.approx(0.5)
    row.segments[1].logprobs = None  # recorded as an action that nobody sampled
    assert unsampled_share([(row, row.pushes)]) == pytest.approx(1.0)
    assert unsampled_share([(row, 0 * row.pushes)]) is None


def test_an_end_counts_if_it_ends_a_turn_and_is_in_the_loss(learner):
    rows = learned([group_of(1.0, 0.0)], learner)
    assert end_learned_share(pushed(rows), Ends(), [False] * 2) == 1
    rows[0].pushes[-1] = 0.0
    assert end_learned_share(pushed(rows), Ends(), [False] * 2) == 0.5
    rows[0].arrays["advantages"][:] = 0.0  # what is left is the KL term, whose gradient is 0 at a certain token
    assert end_learned_share(pushed(rows), Ends(), [False] * 2) == 1
    rows[1].token_ids[-1] = 9  # another token was the last
    assert end_learned_share(pushed(rows), Ends(), [False] * 2) == 0
    assert end_learned_share(pushed(rows), Ends(), [True] * 2) is None  # the environment has stops of its own
    for row in rows:
        row.turns[0] = replace(row.turns[0], stop_reason=StopReason.LENGTH)
    assert end_learned_share(pushed(rows), Ends(), [False] * 2) is None


def test_the_sign_is_that_of_what_the_environment_gave(learner):
    groups = [group_of(1.0, 0.0, 0.0, 1.0)]
    rows = learned(groups, learner)
    assert sign_agreement(rows, groups, has_tallies=True) == 1
    for episode in groups[0].episodes:
        episode.tally.rewards = 1 - episode.tally.rewards
    assert sign_agreement(rows, groups, has_tallies=True) == -1
    assert sign_agreement(rows, groups, has_tallies=False) == 1
    assert sign_agreement(rows, [group_of(1.0, 1.0, 1.0, 1.0)], has_tallies=True) is None
    singles = [Group(str(n), Task("t"), [episode_of(0, reward, 3)]) for n, reward in enumerate((1.0, 0.0, 0.0))]
    rows = learned([Group("g", Task("t"), [group.episodes[0] for group in singles])], learner)
    assert sign_agreement(rows, singles, has_tallies=True) == 1  # of all groups together


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_denominator_is_by_the_settings(aggregation):
    learner = GRPO(GRPOConfig(name="grpo", aggregation=aggregation, constant_length=7))
    rows = learner.prepare(number_rows([group_of(1.0, 0.0, 0.0, 1.0)]))
    total = learner.loss_normalizers(rows)["policy_gradient"]
    for row in rows:
        row.first_outputs = np.nan_to_num(row.old_logprobs)
        row.pushes = row.loss_weights * row.arrays["advantages"] / total
    expected = {"laws/denominator": pytest.approx(1.0), "laws/unpushed_share": 0.0}
    assert denominators(rows, learner) == expected
    for row in rows:
        row.pushes = row.pushes * 3
    assert denominators(rows, learner)["laws/denominator"] == pytest.approx(3)
    for row in rows:
        row.pushes = row.pushes / 9
    assert denominators(rows, learner)["laws/denominator"] == pytest.approx(3)
    rows[0].pushes = rows[1].pushes * 0
    rows[0].pushes = np.zeros(len(rows[0]))
    assert denominators(rows, learner)["laws/unpushed_share"] == 0.25
    assert denominators(rows, PlainLearner(GRPOConfig(name="grpo"))) == {}


class PlainLearner(Learner):
    def prepare(self, groups):
        return []

    def loss(self, role, outputs, batch, normalizers):
        raise NotImplementedError


def test_tokens_of_another_distribution_are_too_likely_or_too_unlikely():
    rng = np.random.default_rng(0)
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    entropy = float(-(probabilities * np.log(probabilities)).sum())

    def row(drawn_from):
        tokens = rng.choice(4, 3000, p=drawn_from)
        made = Row([Segment("action", tokens.tolist(), logprobs=[0.0] * 3000)])
        made.first_outputs = np.log(probabilities)[tokens]
        made.entropies = np.full(3000, entropy)
        return made

    assert abs(surprise_in_errors([row(probabilities)])) < 3
    assert surprise_in_errors([row(np.array([0.625, 0.375, 0.0, 0.0]))]) < -6  # top-p 0.8
    assert surprise_in_errors([row(np.array([0.25] * 4))]) > 6
    certain = row(np.array([1.0, 0.0, 0.0, 0.0]))  # nothing rare came in 3000 tokens: no wonder
    certain.first_outputs, certain.entropies = np.full(3000, -0.0002), np.full(3000, 0.0016)
    assert surprise_in_errors([certain]) > -1
    old = row(probabilities)
    old.is_on_policy = False
    assert surprise_in_errors([old]) is None


def test_gaps_of_first_and_later_turns_are_apart():
    row = row_of(2, 3)
    row.first_outputs = np.nan_to_num(row.old_logprobs) + np.array([0, 0, 0, 0.5, 0.5, 0, 0, 0, 2, 2, 2])
    assert turn_gaps([row]) == (0.5, 2.0)


def test_versions_are_those_that_a_group_was_started_with():
    group = group_of(1.0, 0.0)
    assert version_lag([group]) == 0
    assert version_lag([replace(group, id="step-000002-0/00000")]) == 1
    assert version_lag([replace(group, id="task")]) is None


def test_a_sync_lags_by_the_share_of_the_update_that_is_missing():
    before, after = [-1.0, -2.0, -3.0], [-1.1, -1.7, -3.2]
    assert sync_lag(before, after, after) == 0
    assert sync_lag(before, after, before) == pytest.approx(1)
    half = [(x + y) / 2 for x, y in zip(before, after, strict=True)]
    assert sync_lag(before, after, half) == pytest.approx(0.5)
    assert sync_lag(before, after, [-1.1001, -1.7, -3.2]) < 0.01
    assert sync_lag(after, after, before) is None


# -- the rollout ----------------------------------------------------------------------------------------------------


def rollout(learner, groups, batch, buffered=(), *, n_missing=0, filter=None):
    return laws_of(learner, filter=filter).of_rollout(groups, batch, buffered, 4, n_missing)


def test_lost_episodes_are_counted_with_their_length(learner):
    whole = group_of(1.0, 0.0, 0.0, 1.0)
    part = replace(whole, episodes=whole.episodes[:3])  # of 3, 4 and 5 tokens; the one of 6 is missing
    record = rollout(learner, [whole], [part])
    assert record["laws/lost_share"] == 0.25
    assert record["laws/lost_length"] == 1.5
    assert rollout(learner, [part], [part])["laws/lost_share"] == 0.25  # the runner never returned it
    assert rollout(learner, [whole], [whole], n_missing=2)["laws/missing_groups"] == 2
    laws = laws_of(learner)
    laws.of_rollout([whole], [], [whole], 4, 0)
    later = laws.of_rollout([], [part], [], 4, 0)
    assert later["laws/lost_share"] > 0  # in the buffer
    failed = [*whole.episodes[:3], replace(whole.episodes[3], outcome=Outcome.fail("x", "x"), reward=None)]
    assert rollout(learner, [replace(whole, episodes=failed)], [part])["laws/lost_share"] == 0


def test_a_drop_is_explained_by_the_settings(learner):
    mixed, flat = group_of(1.0, 0.0, 0.0, 1.0), group_of(1.0, 1.0, 1.0, 1.0, name="step-000001-0/00001")
    on = FilterConfig(zero_variance=True)
    assert rollout(learner, [mixed, flat], [mixed], filter=on)["laws/unexplained_drops"] == 0
    assert rollout(learner, [mixed, flat], [mixed])["laws/unexplained_drops"] == 0.5
    assert rollout(learner, [mixed, flat], [flat], filter=on)["laws/unexplained_drops"] == 1
    assert rollout(learner, [mixed, flat], [flat], [mixed])["laws/unexplained_drops"] == 0
    assert is_dropped(mixed.episodes, FilterConfig(min_score=0.5))
    assert is_dropped(mixed.episodes, FilterConfig(max_score=0.5))
    assert not is_dropped(mixed.episodes, FilterConfig(min_score=0.2, max_score=0.8))


def test_rewards_are_those_of_the_turns_and_of_the_environment():
    episode = episode_of(0, 1.0, 3)
    assert reward_error([episode], has_tallies=True) == 0.0
    twice = replace(episode, reward=2.0)
    assert reward_error([twice], has_tallies=False) == 1.0
    twice.rows[0].turns[0].reward = 2.0
    assert reward_error([twice], has_tallies=False) == 0.0
    assert reward_error([twice], has_tallies=True) == 1.0
    assert reward_error([replace(episode, reward=None)], has_tallies=True) is None


def test_returns_and_rows_count_once(learner):
    groups = [group_of(1.0, 0.0)]
    rows = learned(groups, learner)
    laws = laws_of(learner)
    assert laws.of_rows([*rows, rows[0]], groups)["laws/repeated_rows"] == 1
    assert laws.of_rows([rows[0], rows[0]], groups)["laws/repeated_rows"] == 1
    learner.returns = {0: 2.0, 1: 0.0}
    assert laws.of_rows(rows, groups)["laws/return_error"] == 1


def test_tokens_without_a_weight_are_not_trained(learner):
    groups = [group_of(1.0, 0.0)]
    assert laws_of(learner).of_update(learner.prepare(number_rows(groups)), groups) == {}  # only the critic learned
    rows = learned(groups, learner)
    assert laws_of(learner).of_update(rows[:1], groups)["laws/untrained_share"] == pytest.approx(4 / 7)
    rows[1].loss_weights = rows[1].loss_weights * 0
    record = laws_of(learner).of_update(rows, groups)
    assert record["laws/untrained_share"] == pytest.approx(4 / 7)
    assert record["laws/untrained_length"] == pytest.approx(4 / 3)


# -- texts ----------------------------------------------------------------------------------------------------------


def told(answer, gold, score, text):
    messages = [Message("user", "?"), Message.assistant(text)]
    return replace(episode_of(0, score, 3), answer=answer, task=Task("t", "?", answer=gold), messages=messages)


@pytest.mark.parametrize(
    ("answer", "gold", "score", "text", "misgraded", "misread"),
    [
        ("46", 46, 1.0, r"12 + 34 = \boxed{46}", [False], [False]),
        ("1,046", "1046", 1.0, "It is 1,046.", [False], [False]),
        ("12", 46, 0.0, r"12 + 34 = \boxed{46}", [False], [True]),  # the first number, not the box
        ("4", 46, 0.0, "It is 46.", [False], [True]),
        ("46", 46, 0.0, "46", [True], [False]),
        ("47", 46, 1.0, "47", [True], [False]),
        (None, 46, 0.0, r"\boxed{46}", [], [True]),  # the box was not read
        (None, 46, 0.0, "I do not know", [], []),
        ("B", "B", 1.0, "B", [], []),
    ],
)
def test_an_answer_is_read_where_it_stands(answer, gold, score, text, misgraded, misread):
    episode = told(answer, gold, score, text)
    assert misgraded_answers([episode]) == misgraded
    assert misread_answers([episode]) == misread


@pytest.fixture
def conversation(tiny_model):
    """A conversation of two turns, as an agent records it."""
    renderer = ChatRenderer(load_tokenizer(str(tiny_model)))
    from envgym.types import Observation

    dialogue, segments = renderer.dialogue(), []
    segments.append(Segment("prompt", dialogue.begin(Observation([Message("user", "what is 12?")])).token_ids))
    for text, answer in (("is it 34?", "no"), (None, "yes")):
        ids = [*renderer.encode(answer), *renderer.encode("<|im_end|>")]
        dialogue.add_policy_turn(ids)
        segments.append(Segment("action", ids, logprobs=[-1.0] * len(ids)))
        if text is not None:
            extension = dialogue.add_observation(Observation([Message("user", text)]))
            segments.append(Segment("feedback", extension.token_ids))
    row = Row(segments, turns=[Turn(None, StopReason.STOP)] * 2)
    episode = Episode("e", Task("t"), Outcome.finish(), rows=[row], messages=dialogue.messages)
    return episode, Texts(renderer, tiny_model / "tokenizer.json"), renderer


def test_a_right_conversation_is_what_its_tokens_say(conversation):
    episode, texts, _ = conversation
    names = ("undecoded_share", "unsampled_texts", "template_drift")
    assert texts.read([episode]) == {f"laws/{name}": 0.0 for name in names}


def test_a_message_has_no_special_token_that_was_sampled_within_it(conversation):
    episode, texts, renderer = conversation
    sampled = [token for text in ("n", "<|im_start|>", "o", "<|im_end|>") for token in renderer.encode(text)]
    episode.rows[0].segments[1] = Segment("action", sampled, logprobs=[0.0] * len(sampled))
    assert texts.read([episode])["laws/undecoded_share"] == 0


def test_texts_tell_a_drift_a_foreign_text_and_another_tokenizer(conversation):
    episode, texts, renderer = conversation
    segments = episode.rows[0].segments
    right = segments[2]
    segments[2] = Segment("feedback", right.token_ids[:-1])  # without the line break before the turn
    assert texts.read([episode])["laws/template_drift"] == 1
    segments[2] = Segment("feedback", [*renderer.encode("<|im_end|>"), *right.token_ids])  # constantly so
    assert texts.read([episode])["laws/template_drift"] == 1
    segments[2] = Segment("action", right.token_ids, logprobs=[0.0] * len(right.token_ids))
    assert texts.read([episode])["laws/unsampled_texts"] == 1
    segments[2] = Segment("feedback", [index + 1 for index in right.token_ids])
    assert texts.read([episode])["laws/undecoded_share"] == pytest.approx(1 / 4)
    segments[2] = right
    episode.messages[1] = Message.assistant("know")
    assert texts.read([episode])["laws/undecoded_share"] == pytest.approx(1 / 4)


def test_a_template_that_can_continue_needs_no_other_sequence(conversation):
    episode, texts, _ = conversation
    first, last = Row(episode.rows[0].segments[:2]), Row(episode.rows[0].segments[2:])
    episode.rows = [first, last]
    assert texts.read([episode])["laws/template_drift"] == 1
