"""A run's settings: which layer wins, what is refused and how that is said, and that a saved config is the same run."""

import json
import textwrap

import pytest
import yaml

from envgym.config.known_settings import known_keys, other_names, parse_words
from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig, StageConfig
from envgym.config.words import merge, parse_overrides
from envgym.errors import ConfigError, DataError, DroppedSettings, EnvgymError, NameNotFound
from envgym.rollout.config import RolloutConfig
from envgym.run_folder import policy_of_run

ENV = {"env": "math_verify"}


def of_words(*words, **options):
    return resolve(merge(ENV, parse_overrides(words)), **options)


def stage_of(*words, **options):
    [stage] = of_words(*words, **options).stages
    return stage


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def recipe(tmp_path):
    """A recipe of its own, on a model that is a plain folder, so that no model's settings come in between."""
    return str(
        write(
            tmp_path / "recipe.yaml",
            """
            model: ./some-model
            learner: {name: grpo, lr: 1.0e-3, clip_low: 0.1}
            steps: 5
            rollout: {tasks_per_step: 4, group_size: 2}
            """,
        )
    )


# -- layers -----------------------------------------------------------------------------------------------


def test_words_win_over_the_file_and_the_file_over_the_recipe(recipe, tmp_path):
    file = write(tmp_path / "run.yaml", "seed: 7\nsteps: 6\nlearner: {clip_low: 0.2}\nrollout: {tasks_per_step: 8}")
    config = of_words("rollout.tasks_per_step=16", recipe=recipe, file=file)
    [stage] = config.stages
    assert (config.seed, stage.steps, stage.rollout.tasks_per_step, stage.rollout.group_size) == (7, 6, 16, 2)
    assert (stage.learner.settings["lr"], stage.learner.settings["clip_low"]) == (1e-3, 0.2)
    assert (stage.model, config.recipe) == ("./some-model", recipe)


def test_a_model_that_a_recipe_makes_brings_settings_between_recipe_and_file(tmp_path):
    made, plain = stage_of(), stage_of("model=./some-model")
    assert made.learner.settings["lr"] != plain.learner.settings["lr"]
    file = write(tmp_path / "run.yaml", "learner: {lr: 0.5}")
    assert stage_of(file=file).learner.settings["lr"] == 0.5
    assert stage_of("learner.lr=0.25", file=file).learner.settings["lr"] == 0.25


def test_the_recipes_own_model_decides_whose_settings_come_in(recipe):
    assert stage_of(recipe=recipe).rollout.max_tokens == RolloutConfig().max_tokens
    assert stage_of("model=starter", recipe=recipe).rollout.max_tokens == stage_of().rollout.max_tokens


def test_what_a_recipe_says_of_one_stage_wins_over_the_models_settings(tmp_path):
    recipe = write(
        tmp_path / "two.yaml",
        """
        steps: 5
        stages:
          - {agent: replay, learner: {name: sft, lr: 1.0e-2}, steps: 300}
          - {learner: grpo}
        """,
    )
    first, second = resolve(ENV, recipe=str(recipe)).stages
    assert (first.agent.name, first.learner.name, first.learner.settings["lr"], first.steps) == (
        "replay",
        "sft",
        0.01,
        300,
    )
    assert (second.agent.name, second.learner.name) == ("multi_turn", "grpo")
    assert second.steps == stage_of().steps  # what the model says, as nothing nearer does
    assert all(stage.env.name == "math_verify" for stage in (first, second))


@pytest.mark.parametrize(
    ("of_recipe", "words", "length"),
    [
        ("epochs: 1", (), (None, 1)),
        ("epochs: 1", ("steps=9",), (9, None)),
        ("steps: 9", ("epochs=2",), (None, 2)),
        ("epochs: 1", ("epochs=3",), (None, 3)),
        ("epochs: 1", ("epochs=null", "steps=9"), (9, None)),
        ("epochs: 1", ("epochs=null",), (100, None)),
        ("steps: 9", ("steps=null",), (100, None)),
        ("steps: 9", ("epochs=2", "model=starter"), (None, 2)),
        ("epochs: 2", ("model=starter",), (None, 2)),  # whose steps are for runs that are counted in steps
        ("stages: [{epochs: 1}, {steps: 9}]", ("steps=4",), (4, None)),
        ("stages: [{epochs: 1, name: first}]", ("stages.first.steps=7",), (7, None)),
        ("stages: [{steps: 9, name: first}]", ("steps=4", "stages.first.epochs=2"), (None, 2)),
        ("stages: [{recipe: dpo, steps: 3, data: {path: .}}]", (), (3, None)),
    ],
)
def test_of_steps_and_epochs_the_one_of_the_later_layer_counts(tmp_path, of_recipe, words, length):
    recipe = write(tmp_path / "own.yaml", f"env: math_verify\nlearner: grpo\nmodel: ./some-model\n{of_recipe}")
    config = resolve(parse_overrides(words), recipe=str(recipe))
    assert (config.stages[0].steps, config.stages[0].epochs) == length
    saved = write(tmp_path / "saved.yaml", config.to_yaml())
    assert resolve(file=saved).to_yaml() == config.to_yaml()
    further = resolve({"steps": 5}, file=saved)
    assert {(stage.steps, stage.epochs) for stage in further.stages} == {(5, None)}


@pytest.mark.parametrize("words", [("steps=3", "epochs=1"), ("stages.grpo.steps=3", "stages.grpo.epochs=1")])
def test_steps_and_epochs_at_once_are_refused(words, tmp_path):
    with pytest.raises(ConfigError, match="give one"):
        of_words(*words)
    with pytest.raises(ConfigError, match="give one"):
        of_words(file=write(tmp_path / "run.yaml", "steps: 3\nepochs: 1"))


def test_what_a_file_says_of_one_stage_wins_over_what_it_says_of_all(tmp_path):
    file = write(
        tmp_path / "two.yaml",
        """
        env: math_verify
        steps: 5
        learner: {lr: 0.5, weight_decay: 0.1}
        rollout: {tasks_per_step: 4, group_size: 2}
        stages:
          - {agent: replay, learner: {name: sft, lr: 0.25}, rollout: {tasks_per_step: 8}}
          - {learner: grpo, steps: 9}
        """,
    )
    for first, second in (resolve(file=file).stages, resolve(yaml.safe_load(file.read_text())).stages):
        assert (first.steps, first.learner.settings["lr"], first.rollout.tasks_per_step) == (5, 0.25, 8)
        assert (second.steps, second.learner.settings["lr"], second.rollout.tasks_per_step) == (9, 0.5, 4)
        assert {stage.learner.settings["weight_decay"] for stage in (first, second)} == {0.1}


def test_a_word_holds_for_every_stage(tmp_path):
    recipe = write(tmp_path / "two.yaml", "learner: sft\nagent: replay\nstages: [{steps: 3}, {steps: 4}]")
    stages = resolve({**ENV, "steps": 9, "learner": {"lr": 0.125}}, recipe=str(recipe)).stages
    assert [(stage.steps, stage.learner.settings["lr"]) for stage in stages] == [(9, 0.125)] * 2


def learner_of(*words, **options):
    return stage_of(*words, **options).learner


def left_out(noted):
    return [str(note.message) for note in noted if note.category is DroppedSettings]


def test_another_learner_keeps_the_settings_that_all_learners_have(recipe, tmp_path):
    assert learner_of("learner=rloo").settings["lr"] == learner_of().settings["lr"] == 6e-4  # the starter's
    assert learner_of("learner=rloo", recipe=recipe).settings["lr"] == 1e-3
    file = write(tmp_path / "run.yaml", "learner: {lr: 0.5, weight_decay: 0.1}")
    changed = learner_of("learner=ppo", file=file, recipe=recipe).settings
    assert (changed["lr"], changed["weight_decay"], changed["clip_low"]) == (0.5, 0.1, 0.1)
    two = resolve({**ENV, "learner": {"lr": 0.25}, "stages": [{"learner": "rloo"}, {}]}, recipe=recipe)
    assert [stage.learner.settings["lr"] for stage in two.stages] == [0.25, 0.25]


def test_what_another_learner_does_not_have_is_left_out_and_said_in_a_line(recipe, recwarn):
    sft = learner_of("learner=sft", recipe=recipe)
    assert (sft.settings["lr"], "clip_low" in sft.settings) == (1e-3, False)
    assert left_out(recwarn) == [
        "learner sft does not have these settings of grpo, which are dropped: learner.clip_low"
    ]


def test_a_setting_that_only_has_the_same_name_does_not_go_over(tmp_path, recwarn):
    """What a learner of one's own calls `clip_low` need not be what ours do."""
    own = write(
        tmp_path / "own.py",
        """
        from envgym.learner import Learner, LearnerConfig

        class Settings(LearnerConfig):
            clip_low: str = "none"

        class Own(Learner):
            Config = Settings

            def prepare(self, groups): ...

            def loss(self, role, outputs, batch, normalizers): ...
        """,
    )
    settings = learner_of("learner.lr=0.5", "learner.clip_low=high", f"learner={own}").settings
    assert (settings["lr"], settings["clip_low"]) == (0.5, "high")  # said of no other learner
    file = write(tmp_path / "run.yaml", "learner: {name: grpo, lr: 0.25, clip_low: 0.1}")
    settings = learner_of(f"learner={own}", file=file).settings
    assert (settings["lr"], settings["clip_low"]) == (0.25, "none")
    assert len(left_out(recwarn)) == 1


def test_the_defaults_in_a_saved_config_say_nothing_of_another_learner(tmp_path, recwarn):
    saved = write(tmp_path / "config.yaml", of_words("learner.lr=0.5", "learner.kl.coef=0.1").to_yaml())
    assert learner_of("learner=dr_grpo", file=saved) == learner_of(
        "learner=dr_grpo", "learner.lr=0.5", "learner.kl.coef=0.1"
    )
    assert left_out(recwarn) == []


def test_a_learner_that_is_gone_can_be_replaced(tmp_path):
    file = write(tmp_path / "run.yaml", "learner: {name: gone.py, lr: 0.5, own: 1}")
    with pytest.warns(DroppedSettings, match=r"learner\.own"):
        assert learner_of("learner=grpo", file=file).settings["lr"] == 0.5


def test_settings_of_an_agent_that_is_found_by_itself_are_those_of_the_one_named_later(tmp_path, recwarn):
    file = write(tmp_path / "run.yaml", "agent: {max_turns: 3}")
    assert stage_of("agent=multi_turn", file=file).agent.settings["max_turns"] == 3
    named = write(tmp_path / "named.yaml", "agent: {name: tool_calling, max_turns: 3}")
    assert stage_of("agent=multi_turn", file=named).agent.settings["max_turns"] == 3
    assert left_out(recwarn) == []


def test_settings_of_another_environment_are_left_out_and_said(tmp_path, recwarn):
    file = write(tmp_path / "run.yaml", "env: {name: math_verify, digits: 3}")
    assert resolve({"env": "tool_use"}, file=file).stages[0].env.name == "tool_use"
    assert "env tool_use does not have these settings of math_verify, which are dropped: env.digits" in left_out(
        recwarn
    )


# -- models of single roles -------------------------------------------------------------------------------


def test_the_starter_says_the_critics_rate_beside_the_actors_and_a_recipe_where_the_model_does_not(recwarn):
    def rates(*words):
        stage = stage_of(*words, recipe="ppo")
        return stage.learner.settings["lr"], stage.roles["critic"].learner["lr"]

    assert rates() == (6e-4, 1e-3)
    assert rates("roles.critic.learner.lr=0.5") == (6e-4, 0.5)
    assert rates("model=./some-model") == (5e-7, 9e-6)
    assert stage_of("learner=ppo").roles["critic"].learner == {"lr": 1e-3}
    assert stage_of("learner=grpo").roles == {}  # which has no critic
    assert left_out(recwarn) == []


def test_a_roles_optimizer_has_settings_of_its_own():
    words = ["learner=ppo", "learner.warmup_steps=7", "learner.optimizer=muon", "learner.muon_lr=0.1"]
    own = {"lr": 0.5, "warmup_ratio": 0.25, "optimizer": "adamw"}
    stage = stage_of(*words, *(f"roles.critic.learner.{key}={value}" for key, value in own.items()))
    actor, critic = stage.learner_config_of("actor"), stage.learner_config_of("critic")
    assert (actor.warmup_steps, actor.warmup_ratio, actor.muon_lr) == (7, 0, 0.1)
    assert {**own, "warmup_steps": 0, "muon_lr": None}.items() <= critic.model_dump().items()
    assert critic.gae_lambda == actor.gae_lambda


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("roles.critic.learner.minibatches=2", r"roles\.critic\.learner: unknown key 'minibatches'"),
        ("roles.critic.learner.lr=fast", r"roles\.critic\.learner: key 'lr': must be a number"),
        ("roles.critic.lr=1", r"unknown key 'roles\.critic\.lr'\. Did you mean 'roles\.critic\.learner\.lr'\?"),
        ("roles.critic.rank=4", r"unknown key 'roles\.critic\.rank'\. Did you mean 'roles\.critic\.lora\.rank'\?"),
        ("roles.critic.modle=m", r"unknown key 'roles\.critic\.modle'\. Did you mean 'roles\.critic\.model'\?"),
        ("roles.reference.learner.lr=1", "the reference is not trained, so it has no optimizer"),
    ],
)
def test_other_settings_of_a_role_are_refused(word, problem):
    with pytest.raises(ConfigError, match=problem):
        stage_of("learner=ppo", "learner.kl.coef=0.1", word)


def test_roles_of_a_recipes_learner_go_with_it():
    assert stage_of("learner=reinforce++", "model=./some-model", recipe="ppo").roles == {}


def test_a_role_of_ones_own_words_that_the_learner_lacks_is_refused():
    for words in (["roles.critic.learner.lr=1"], ["roles.critic.learner.lr=1", "learner=rloo"]):
        with pytest.raises(ConfigError, match="no role 'critic'"):
            stage_of(*words)


def test_settings_beside_the_same_name_are_kept(recipe):
    assert stage_of("learner=grpo", "learner.clip_high=0.3", recipe=recipe).learner.settings["clip_low"] == 0.1


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"agent": {"name": "auto", "max_turns": 1}}, {"agent": "b"}, {"agent": {"name": "b", "max_turns": 1}}),
        ({"learner": "a"}, {"learner": {"lr": 1}}, {"learner": {"name": "a", "lr": 1}}),
        ({"learner": {"name": "a", "lr": 1}}, {"learner": "a"}, {"learner": {"name": "a", "lr": 1}}),
        ({"learner": {"name": "a", "lr": 1}}, {"learner": "b"}, {"learner": {"name": "b"}}),
        ({"learner": {"lr": 1}}, {"learner": "b"}, {"learner": {"name": "b", "lr": 1}}),
        ({"rollout": {"a": 1, "b": 2}}, {"rollout": {"b": 3}}, {"rollout": {"a": 1, "b": 3}}),
        ({"betas": [1, 2]}, {"betas": [3]}, {"betas": [3]}),
    ],
)
def test_merge(base, over, merged):
    assert merge(base, over) == merged


def test_merge_leaves_what_it_was_given_alone():
    base, over = {"rollout": {"a": 1}, "env": {"name": "x"}}, {"rollout": {"b": 2}, "env": {"size": 3}}
    merge(base, over)
    assert (base, over) == ({"rollout": {"a": 1}, "env": {"name": "x"}}, {"rollout": {"b": 2}, "env": {"size": 3}})


# -- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-2.5E+3", -2500.0),
        ("1.e2", 100.0),
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ("[0.9, 0.98]", [0.9, 0.98]),
        ("{a: 1}", {"a": 1}),
        ("plain text", "plain text"),
        ("a=b", "a=b"),
        ("", None),
        ("nan", "nan"),  # text: someone's field may have that name
        ("infinity", "infinity"),
        ("[", "["),  # not YAML, so it is what it says
    ],
)
def test_a_words_value_is_yaml(text, value):
    parsed = parse_overrides([f"key={text}"])["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.template", "Q: {question}\nA: {answer}"),
        ("data.template", "Q: {question}\nQ: {question}"),  # to YAML a key that is given twice
        ("data.template", "{question}"),
        ("data.template", "two\nlines of {}"),  # which YAML would fold
        ("data.system", "Answer with the number # alone"),
        ("data.system", "#1 among helpers"),
        ("data.system", "[INST]"),
        ("data.system", "no"),
        ("data.system", "*alias &anchor"),
        ("data.system", "  indented "),
        ("data.sources.a.path", "2024"),
        ("name", "007"),
        ("name", "2024-01-01"),
        ("model", "1e5"),
        ("model", "1.10"),
        ("stages.first.model", "12"),
        ("engine.api_key_env", ""),
        ("env.instruction", "yes"),
        ("env.instruction", "{read}"),
    ],
)
def test_a_setting_that_is_text_takes_it_as_it_is(key, text):
    parsed = parse_words([f"{key}={text}"], {"env": "math_verify"})
    for part in key.split("."):
        parsed = parsed[part]
    assert parsed == text


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ('data.template="{}\\n"', "{}\n"),  # in quotes it is YAML, as ever
        ("data.template='no'", "no"),
        ("data.system=null", None),
        ("data.select={level: [4]}", {"level": [4]}),
        ("env.digits=3", 3),
        ("eval.every=no", False),
        ("rollout.failed_reward=1e-1", 0.1),
        ("learner.freeze=[embed_tokens]", ["embed_tokens"]),  # a list of texts is no text
    ],
)
def test_other_values_are_yaml_still(word, value):
    [(_, group)] = parse_words([word], {"env": "math_verify"}).items()
    assert list(group.values()) == [value]


def test_rows_may_stand_in_a_word_where_a_path_may():
    file = parse_words(["data.path=[{prompt: a, answer: b}]"], {})["data"]["path"]
    with open(file) as rows:
        assert json.loads(rows.read()) == {"prompt": "a", "answer": "b"}


def test_dots_nest():
    assert parse_overrides(["a.b.c=1", "a.d=2", "e=3"]) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}


@pytest.mark.parametrize("word", ["steps", "=3", "--steps=3", "-x=1"])
def test_a_word_that_is_no_setting_is_refused(word):
    with pytest.raises(ConfigError, match="is not a key=value setting"):
        parse_overrides([word])


@pytest.mark.parametrize("words", [["learner=sft", "learner.lr=1"], ["learner.lr=1", "learner=sft"]])
def test_a_name_and_settings_may_come_in_either_order(words):
    learner = merge({"learner": "grpo"}, parse_overrides(words))["learner"]
    assert learner == {"name": "sft", "lr": 1}


def test_later_words_win():
    assert parse_overrides(["steps=1", "rollout.tasks_per_step=1", "rollout.tasks_per_step=2", "steps=2"]) == {
        "steps": 2,
        "rollout": {"tasks_per_step": 2},
    }


# -- what is refused, and how -----------------------------------------------------------------------------

REFUSED = {
    # an unknown key names its neighbour, at every level
    "stpes=3": "unknown key 'stpes'. Did you mean 'steps'?",
    "rollout.task_per_step=3": "unknown key 'rollout.task_per_step'. Did you mean 'rollout.tasks_per_step'?",
    "learner.lrr=1": "learner grpo: unknown key 'lrr'. Did you mean 'lr'?",
    "env.digit=1": "environment math_verify-v0: unknown key 'digit'. Did you mean 'digits'?",
    # wherever it is, and whatever others call it
    "lr=1": "unknown key 'lr'. Did you mean 'learner.lr'?",
    "tasks=4": "unknown key 'tasks'. Did you mean 'eval.tasks'?",
    "temperature=1": "unknown key 'temperature'. Did you mean 'rollout.temperature' or 'eval.temperature'?",
    "batch_size=4": "unknown key 'batch_size'. Did you mean 'learner.minibatches' or 'rollout.tasks_per_step'?",
    "beta=0.1": "unknown key 'beta'. Did you mean 'learner.kl.coef'?",
    "dtype=bfloat16": "unknown key 'dtype'. Did you mean 'engine.dtype' or 'workers.dtype'?",
    "path=x": "Did you mean 'pretrain.path' or 'data.path'?",
    "max_turns=3": "unknown key 'max_turns'. Did you mean 'agent.max_turns'?",
    "sampling=1": "unknown key 'sampling'. Did you mean 'rollout'?",
    "peft.r=8": "unknown key 'peft'. Did you mean 'lora'?",
    "rollout.n=4": "unknown key 'rollout.n'. Did you mean 'rollout.group_size'?",
    "rollout.zero_variance=true": "Did you mean 'rollout.filter.zero_variance'?",
    "learner.kl_coef=0.1": "learner grpo: unknown key 'kl_coef'. Did you mean 'learner.kl.coef'?",
    "learner.beta=0.1": "learner grpo: unknown key 'beta'. Did you mean 'learner.kl.coef'?",
    "learner.temperature=1": "learner grpo: unknown key 'temperature'. Did you mean 'rollout.temperature' or",
    "agent.turns=1": "agent multi_turn: unknown key 'turns'.",
    # a value of the wrong kind or size says what was given
    "steps=-1": "key 'steps': must be at least 1, got -1",
    "steps=many": "key 'steps': must be a whole number, got 'many'",
    "learner.lr=fast": "learner grpo: key 'lr': must be a number",
    "learner.lr=.inf": "learner grpo: key 'lr': must be a finite number, got inf",
    "learner.lr=true": "learner grpo: key 'lr': must be a number, got True",
    "learner.shaping.clip=[0, .nan]": "learner grpo: key 'shaping.clip': the lower bound comes first",
    "steps=12345678901234567890123": "key 'steps': must fit into 64 bits, got 12345678901234567890123",
    "seed=4294967296": "key 'seed': must be less than 4294967296",  # engines take no greater ones
    "engine.args={a: 1, a: 2}": "engine.args={a: 1, a: 2}: key 'a' is given twice",
    "workers.tokens_per_microbatch=all": "key 'workers.tokens_per_microbatch': must be a whole number, or 'auto'",
    "eval.every=no": "key 'eval.every': must be a number, got False (YAML reads no, off, yes and on without quotes as",
    "colocate=off": "must be 'auto', 'none' or 'all', got False (YAML reads no, off,",
    "eval.every=-1": "key 'eval.every': must be at least 0, or 'epoch', got -1",
    "learner.aggregation=words": "learner grpo: key 'aggregation': must be 'token', 'sequence' or 'constant'",
    "rollout.temperature=0": "key 'rollout.temperature': must be more than 0, got 0",
    "engine.kind=sglang": "there is no engine 'sglang'. There is auto, openai, transformers, vllm.",
    "engine=vlm": "there is no engine 'vlm'. Did you mean 'vllm'?",
    "rollout=3": "key 'rollout' holds nested keys (rollout.…), not 3",
    "name=a/b": "key 'name'",
    "stages=3": "key 'stages' is a list of settings",
    # names that nothing is registered under
    "env=math_verfy": "there is no environment 'math_verfy'. Did you mean 'math_verify'?",
    "learner=gpro": "there is no learner 'gpro'. Did you mean 'grpo'?",
    "agent=single_tun": "there is no agent 'single_tun'. Did you mean 'single_turn'?",
    "agent=3": "key 'agent' is a name, or a name and settings, not 3",
    "learner.name=3": "key 'learner.name': must be text, got 3",
    "recipe=3": "key 'recipe': must be text, got 3: a recipe's name, or the path of its file",
    # settings that contradict each other, files that are not there
    "rollout.group_size=1": "the episodes of one task: rollout.group_size must be at least 2, not 1",
    "data.path=none.jsonl": "data.path: there is no file or folder none.jsonl",
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_mistake_is_one_line_that_says_what_to_do(word):
    with pytest.raises(EnvgymError) as refused:
        of_words(word)
    assert isinstance(refused.value, ConfigError | NameNotFound | DataError)
    assert REFUSED[word] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["agent=single_turn", "learner.advantage=tree"],
            "agent single_turn takes one (agent.max_turns=1): set rollout.branches=0, or agent=multi_turn",
        ),
        (
            ["agent=external", "agent.command=program", "learner.advantage=tree"],
            "the turns of agent external are recorded, and not what it does in the environment, so they cannot",
        ),
        ([], "learner grpo would learn the turns that episodes share several times: set learner.advantage=tree, with"),
        (["learner=ppo"], "learner ppo would learn the turns that episodes share several times"),
        (["learner=ppo", "learner.advantage=tree"], "learner ppo: unknown key 'advantage'"),
    ],
)
def test_branches_need_turns_that_can_be_repeated_and_a_learner_of_trees(words, says):
    with pytest.raises(ConfigError) as refused:
        of_words("rollout.branches=2", *words)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "word", ["lora.horizon=3", "lora.kind=3", "agent.target=1", "prompt_length=3", "quux.lr=1", "generator=1"]
)
def test_without_a_near_setting_none_is_suggested(word):
    with pytest.raises(ConfigError, match="unknown key") as refused:
        of_words(word)
    assert "Did you mean" not in str(refused.value)


def test_a_hint_names_what_the_runs_own_parts_have():
    with pytest.raises(ConfigError) as refused:
        of_words("learner=sft", "agent=replay", "learner.beta=0.1")
    assert "'learner.kl.coef'" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"Did you mean 'learner\.gae_lambda'"):
        of_words("learner=ppo", "lam=0.9")


def test_every_key_that_others_have_another_name_for_is_one():
    keys = {*known_keys({"env": "math_verify", "learner": "ppo"}), "engine.args", *StageConfig.model_fields}
    assert other_names().keys() <= keys
    known = {key.rpartition(".")[2] for key in keys}
    assert not {name for names in other_names().values() for name in names} & known


def test_an_environment_is_asked_for():
    with pytest.raises(ConfigError, match=r"which environment\? Give one with --env"):
        resolve({})


def test_a_mistake_in_one_of_several_stages_names_the_stage(tmp_path):
    recipe = write(tmp_path / "two.yaml", "stages: [{learner: grpo}, {learner: grpo, rollout: {tasks_per_step: 0}}]")
    with pytest.raises(ConfigError, match=r"stage 2: key 'rollout.tasks_per_step'"):
        resolve(ENV, recipe=str(recipe))


def test_a_learner_of_single_episodes_takes_groups_of_one():
    assert stage_of("learner=sft", "rollout.group_size=1").rollout.group_size == 1


def test_a_replay_has_no_groups_to_compare():
    assert stage_of("agent=replay", "learner=sft", "rollout.group_size=1").agent.name == "replay"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", r"bad.yaml:1: not valid YAML"),
        ("rollout:\n  tasks: 1\n  tasks: 2", r"bad.yaml:3: not valid YAML \(key 'tasks' is given twice\)"),
        ("learner: {lr: 1, lr: 2}", r"bad.yaml:1: not valid YAML \(key 'lr' is given twice\)"),
        ("- 1\n- 2", r"bad.yaml: a config file holds `key: value` pairs, not a list"),
        ("learner:\n  # lr: 1", "key 'learner' is a name, or a name and settings, not None"),
        ("learner: [a]", r"key 'learner' is a name, or a name and settings, not \['a'\]"),
        ("learner: {name: 3}", "key 'learner.name': must be text, got 3"),
        ("recipe: 3", "key 'recipe': must be text, got 3"),
        ("1: 2", "key 1: must be text, the name of a setting"),
        ("stages: [{1.5: 2}]", "key 1.5: must be text, the name of a setting"),
        (
            "rollout:\n  tsaks_per_step: 1",
            r"unknown key 'rollout.tsaks_per_step'. Did you mean 'rollout.tasks_per_step'\?",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        resolve(ENV, file=write(tmp_path / "bad.yaml", text))


@pytest.mark.parametrize(
    "stages", ["[{learner: grpo}]", "[grpo]", "grpo", "{grpo: {}}", "[{render: chat, engine: {}, rollout: {}}]"]
)
def test_a_models_folder_may_hold_a_config_written_by_hand(tmp_path, stages):
    write(tmp_path / "config.yaml", f"stages: {stages}")
    assert stage_of(f"model={tmp_path}").rollout == stage_of("model=./some-model").rollout
    with pytest.raises(ConfigError, match="holds no model, and is not the folder of a run"):
        policy_of_run(tmp_path)


DOTTED = """
    learner.lr: 1.0e-4
    rollout.filter.zero_variance: true
    learner: {name: grpo, kl.coef: 0.25}
    rollout: {temperature: 0.5}
    roles: {reference: {workers.ranks: 2}}
    engine.args: {some.argument: 1}
    """


@pytest.mark.parametrize("stages", [False, True])
def test_a_dotted_key_of_a_file_is_a_nested_one(tmp_path, stages):
    text = textwrap.dedent(DOTTED)
    if stages:
        text = "stages:\n- name: first\n" + textwrap.indent(text, "  ")
    [stage] = resolve(ENV, file=write(tmp_path / "run.yaml", text)).stages
    learner = stage.learner_config()[1]
    assert (learner.lr, learner.kl.coef) == (1e-4, 0.25)
    assert (stage.rollout.filter.zero_variance, stage.rollout.temperature) == (True, 0.5)
    assert stage.roles["reference"].workers == {"ranks": 2}
    assert stage.engine.args == {"some.argument": 1}  # whose keys are vLLM's


def test_a_dotted_key_of_a_recipe_and_of_a_stage_by_name(tmp_path):
    recipe = write(tmp_path / "own.yaml", "stages: [{name: a, learner: grpo, learner.lr: 1.0e-3}]\nlearner.gamma: 0.5")
    [stage] = of_words("stages.a.learner.clip_low=0.1", recipe=str(recipe)).stages
    learner = stage.learner_config()[1]
    assert (learner.lr, learner.gamma, learner.clip_low) == (1e-3, 0.5, 0.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eval: {every: no}", r"eval.every': must be a number, got False \(YAML reads no"),
        ("model: 7", r"'model': must be text, got 7 \(in YAML, write it in quotes\)"),
        ("name: no", r"'name': must be text, got False \(YAML reads no"),
    ],
)
def test_what_yaml_makes_of_a_value_is_said(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        resolve(ENV, file=write(tmp_path / "run.yaml", text))


def test_numbers_that_only_look_like_mistakes_are_taken(tmp_path):
    file = write(tmp_path / "run.yaml", "eval: &alike {every: 4}\ncheckpoint: {<<: *alike, every: 6}")
    stage = stage_of("learner.shaping.clip=[0, .inf]", "steps=1e2", "eval.greedy=1", "checkpoint.every=8", file=file)
    assert (stage.checkpoint.every, stage.eval.every, stage.steps, stage.eval.greedy) == (8, 4, 100, True)
    assert stage.learner.settings["shaping"]["clip"] == [0, float("inf")]


def test_an_empty_file_says_nothing(tmp_path):
    assert resolve(ENV, file=write(tmp_path / "empty.yaml", "")) == resolve(ENV)


# -- the saved config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["name=math_verify-reinforce++-1"],  # what a run without a name is called
        ["seed=3", "learner.lr=1e-5", "rollout.top_p=0.9", "env.digits=3", "engine.args.swap_space=2"],
        ["learner=sft", "agent=replay", "name=first", "render=text", "sync.tolerance=0.01"],
    ],
)
def test_a_saved_config_is_the_same_run(tmp_path, words):
    config = of_words(*words)
    file = write(tmp_path / "config.yaml", config.to_yaml())
    assert resolve(file=file) == config
    assert resolve(file=file).to_yaml() == config.to_yaml()


def test_a_saved_config_of_several_stages_is_the_same_run_without_its_recipe(recipe, tmp_path):
    two = write(tmp_path / "two.yaml", "steps: 3\nstages: [{learner: sft, agent: replay}, {learner: grpo}]")
    config = resolve(ENV, recipe=str(two))
    file = write(tmp_path / "config.yaml", config.to_yaml())
    two.unlink()  # a run is resumed from anywhere, whatever became of the file it was made from
    assert resolve(file=file) == config


def test_a_saved_config_has_every_key_written_out():
    saved = yaml.safe_load(of_words().to_yaml())
    assert set(saved) == set(RunConfig.model_fields)
    assert {"lr", "clip_low", "kl", "aggregation"} <= set(saved["stages"][0]["learner"])


def test_words_change_a_saved_config(tmp_path):
    file = write(tmp_path / "config.yaml", of_words("steps=3").to_yaml())
    [stage] = resolve(parse_overrides(["steps=4", "learner.lr=0.5"]), file=file).stages
    assert (stage.steps, stage.learner.settings["lr"]) == (4, 0.5)


def test_the_same_settings_from_python_are_the_same_run():
    assert of_words("seed=1", "rollout.tasks_per_step=3", "learner.lr=1e-5") == resolve(
        {**ENV, "seed": 1, "rollout": {"tasks_per_step": 3}, "learner": {"lr": 1e-5}}
    )


@pytest.mark.parametrize(
    ("words", "steps", "ratio"),
    [
        ([], 0, 0.1),  # the starter's own
        (["learner.warmup_steps=7"], 7, 0.0),
        (["learner.warmup_ratio=0"], 0, 0.0),
        (["learner=dr_grpo", "learner.warmup_steps=7"], 7, 0.0),
    ],
)
def test_a_later_layers_warmup_replaces_an_earlier_one_in_steps_or_as_a_share(words, steps, ratio):
    stage = stage_of(*words)
    config = stage.learner_config()[1]
    assert (config.warmup_steps, config.warmup_ratio) == (steps, ratio)
