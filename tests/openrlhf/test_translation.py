"""What becomes of flags that belong together, of `rlhf.yaml`, and of what is refused."""

from __future__ import annotations

import pytest
import yaml

from envgym.config.words import parse_overrides
from envgym.errors import ConfigError
from envgym.openrlhf.rlhf import entry_point, translate_file
from envgym.openrlhf.translate import translate

PPO = ["--pretrain", "org/model", "--prompt_data", "org/prompts", "--reward_pretrain", "org/judge"]
SFT = ["--pretrain", "org/model", "--dataset", "rows"]
PLAY = [*SFT, "--output_path", "o", "--eval_task", "play"]


def settings_of(program, *flags, **options):
    return translate(program, list(flags), **options).settings


@pytest.mark.parametrize(
    ("program", "flags", "said"),
    [
        ("train_ppo_rai", PPO, "there is no program 'train_ppo_rai'. Did you mean 'train_ppo_ray'?"),
        ("train_sft", SFT[:2], "train_sft: which data? Give --dataset"),
        ("train_ppo_ray", PPO[2:], "train_ppo_ray: which model? Give --pretrain"),
        ("train_ppo_ray", PPO[:2] + PPO[4:], "train_ppo_ray: which prompts? Give --prompt_data"),
        ("train_ppo_ray", PPO[:4], "train_ppo_ray: which reward?"),
        ("train_ppo_ray", [*PPO, "--remote_rm_url", "f.py"], "--reward_pretrain and --remote_rm_url exclude"),
        ("train_ppo_ray", [*PPO, "--agent_func_path", "f.py"], "--reward_pretrain and --agent_func_path exclude"),
        ("train_ppo_ray", [*PPO, "--advantage_estimator", "vtrace"], "--advantage_estimator is one of gae, reinforce"),
        ("train_ppo_ray", [*PPO, "--advantage_estimator", "rloo"], "rloo compares the completions of a prompt"),
        ("train_ppo_ray", [*PPO, "--kl_estimator", "k4"], "--kl_estimator is one of k1, k2, k3, not k4"),
        ("train_ppo_ray", [*PPO, "--use_ms"], "--use_ms: the ModelScope hub is not read"),
        ("train_sft", [*SFT, "--dataset_probs", "0.5,0.5"], None),
        ("train_sft", [*SFT[:3], "a,b,c", "--dataset_probs", "0.5,0.5"], "names 3 sources, --dataset_probs 2"),
        ("train_sft", [*SFT[:3], "a,b", "--dataset_probs", "x,y"], "--dataset_probs takes a number for each"),
        ("train_ppo_ray", [*PPO[:3], "a,b", *PPO[4:], "--prompt_data_probs", "0.5,x"], "--prompt_data_probs takes a"),
        ("train_ppo_ray", [*PPO, "--train_batch_size", "0"], "--train_batch_size is 1 or more, not 0"),
        ("train_prm", SFT, "train_prm: at which text does a step end? Give --placeholder_token"),
        ("batch_inference", PLAY, "generate_vllm, generate or rm, not play"),
        ("serve_rm", [], "serve_rm: which model? Give --reward_pretrain"),
        ("lora_combiner", ["--model_path", "m", "--lora_path", "l"], "where is the result to go? Give --output_path"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_in_one_line(program, flags, said):
    if said is None:
        translate(program, flags)
        return
    with pytest.raises(ConfigError) as error:
        translate(program, flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_several_reward_models():
    made = settings_of("train_ppo_ray", *PPO[:4], "--reward_pretrain", "a,b", "--apply_chat_template")
    assert made["env.models"] == [{"model": "a", "ranks": 8}, {"model": "b", "ranks": 8}]


def test_words_are_read_back_as_they_are():
    template = "a: {}\nb = [1] '\"' "
    made = translate("train_sft", [*SFT, "--input_template", template, "--max_samples", "7"])
    read = parse_overrides(made.arguments[3:])
    assert read["env"]["template"] == template
    assert read["data"]["limit"] == 7
    assert read["learner"]["lr"] == 5e-6


def test_a_token_is_no_setting_and_is_in_the_environment():
    made = translate("train_sft", [*SFT, "--use_wandb", "s3cret", "--wandb_run_name", "first"])
    assert made.environ == {"WANDB_API_KEY": "s3cret", "WANDB_NAME": "first"}
    assert not any("s3cret" in word for word in made.arguments)
    assert translate("train_sft", [*SFT, "--wandb_run_name", "first"]).environ == {}


FILE = {
    "model_name_or_path": "org/model", "ref_model_name_or_path": "org/reference",
    "data": {"train_file": "pairs.jsonl", "max_length": 512}, "beta": 0.2, "loss_type": "ipo",
    "peft": {"r": 8, "lora_alpha": 32}, "trace": "swanlab",
    "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 2e-6},
    "ppo": {"train_file": "prompts.parquet", "rollout_n": 4, "ppo_mini_batch_size": 64, "actor_lr": 3e-6,
            "n_gpus_per_node": 2, "nnodes": 1, "reward_model_name_or_path": "org/judge", "kl_loss_type": "low_var_kl"},
}  # fmt: skip


def from_file(tmp_path, name, changes=(), **options):
    file = tmp_path / "rlhf.yaml"
    file.write_text(yaml.safe_dump({**FILE, **dict(changes)}))
    return translate_file(name, ["--config", str(file)], **options)


def test_dpo_of_rlhf_yaml(tmp_path):
    made = from_file(tmp_path, "train_dpo", world_size=4)
    wanted = {
        "model": "org/model", "roles.reference.model": "org/reference", "data.path": "pairs.jsonl",
        "agent.max_tokens": 512, "learner.beta": 0.2, "learner.loss": "ipo", "lora.rank": 8, "lora.alpha": 32,
        # 2 pairs on each of 4 ranks, 4 times before a step
        "rollout.tasks_per_step": 32, "workers.ranks": 4, "learner.lr": 2e-6, "report_to": ["swanlab"],
    }  # fmt: skip
    assert {key: made.settings.get(key) for key in wanted} == wanted
    assert made.words == ["--recipe", "dpo"]


def test_ppo_and_grpo_of_rlhf_yaml(tmp_path):
    made = from_file(tmp_path, "train_grpo")
    wanted = {
        "data.path": "prompts.parquet", "data.prompt": "prompt", "rollout.group_size": 4, "learner.lr": 3e-6,
        # VERL counts prompts: 64 of 1024 a mini-batch
        "rollout.tasks_per_step": 1024, "learner.minibatches": 16, "learner.kl.applied_to": "loss",
        "learner.kl.estimator": "k3",
        "learner.kl.coef": 0.001, "workers.ranks": 2, "colocate": "all", "render": "chat",
        "roles.reference.model": "org/reference", "env.models": [{"model": "org/judge", "ranks": 2}],
    }  # fmt: skip
    assert {key: made.settings.get(key) for key in wanted} == wanted
    ppo = from_file(tmp_path, "train_ppo")
    assert ppo.words[1] == "ppo"
    assert ppo.settings["learner.kl.coef"] == 0  # neither in the loss nor in the reward
    assert "roles.reference.model" not in ppo.settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_type": "pai"}, "loss_type: pai: no paper that we know of"),
        ({"loss_type": "hinge"}, "loss_type is one of sigmoid, ipo, pai, not hinge"),
        ({"betta": 1}, "unknown key 'betta'. Did you mean 'beta'?"),
    ],
)
def test_what_rlhf_yaml_may_not_say(tmp_path, changes, said):
    with pytest.raises(ConfigError) as error:
        from_file(tmp_path, "train_dpo", changes)
    assert said in str(error.value)


def test_entry_points_are_found_by_name_and_by_path():
    assert entry_point("rlhf:train_dpo") == "train_dpo"
    assert entry_point("self_model/rlhf/train_grpo.py") == "train_grpo"
    assert entry_point("train_dpo") is None  # OpenRLHF's
    assert entry_point("train_sft.py") is None


DOTTED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.model_name_or_path", "judge"]


def test_the_critic_starts_from_the_first_reward_model(tmp_path):
    start = "roles.critic.model"
    assert settings_of("train_ppo_ray", *PPO)[start] == "org/judge"
    assert settings_of("train_ppo_ray", *PPO[:5], "a,b")[start] == "a"
    assert settings_of("train_ppo_ray", *PPO, "--critic_pretrain", "c")[start] == "c"
    assert start not in settings_of("train_ppo_ray", *PPO[:4], "--remote_rm_url", "http://h:1/r")
    assert start not in settings_of("train_ppo_ray", *PPO, "--advantage_estimator", "reinforce")
    assert from_file(tmp_path, "train_ppo").settings[start] == from_file(tmp_path, "train_ppo").settings["model"]


def test_dotted_commands_have_their_own_defaults():
    flat, dotted = settings_of("train_ppo_ray", *PPO), settings_of("train_ppo_ray", *DOTTED)
    assert (flat["engine.max_model_len"], flat["rollout.max_tokens"]) == (2048, 1024)
    assert (dotted["engine.max_model_len"], dotted["rollout.max_tokens"]) == (2048, 2048)
    assert (flat["workers.tokens_per_microbatch"], dotted["workers.tokens_per_microbatch"]) == (4 * 2048, 2048)
    longer = settings_of("train_ppo_ray", *DOTTED, "--data.max_len", "4096", "--reward.overlong_buffer_len", "512")
    assert (longer["rollout.max_tokens"], longer["learner.shaping.overlong_length"]) == (4096, 4096)


def critic_settings(*words):
    made = settings_of("train_ppo_ray", *words)
    start = "roles.critic."
    return made, {key.removeprefix(start): value for key, value in made.items() if key.startswith(start)}


def test_flat_flags_set_both_optimizers_and_dotted_ones_each_its_own():
    made, critic = critic_settings(*PPO, "--lr_warmup_ratio", "0.2", "--max_norm", "0.5", "--lr_scheduler", "linear")
    assert critic.keys() == {"learner.lr", "model"}
    keys = ("learner.warmup_ratio", "learner.max_grad_norm", "learner.lr_min_ratio")
    assert [made[key] for key in keys] == [0.2, 0.5, 0.0]
    actor = ["--actor.lr_warmup_ratio", "0.2", "--actor.adam.betas", "0.9", "0.99", "--actor.lr_scheduler", "constant"]
    others = ["--critic.max_norm", "2", "--critic.optim", "muon", "--critic.adam.eps", "1e-6"]
    made, critic = critic_settings(*DOTTED, *actor, *others)
    keys = ("learner.warmup_ratio", "learner.lr_schedule", "learner.betas")
    assert [made[key] for key in keys] == [0.0, "constant", [0.9, 0.99]]
    assert critic.pop("model") == "judge"
    assert {key.removeprefix("learner."): value for key, value in critic.items()} == {
        "lr": 9e-6, "warmup_ratio": 0.03, "betas": [0.9, 0.95], "eps": 1e-6, "max_grad_norm": 2,
        "optimizer": "muon", "muon_lr": 0.02, "muon_momentum": 0.95, "lr_schedule": "cosine", "lr_min_ratio": 0.1,
    }  # fmt: skip


def test_evaluations_and_the_best_checkpoint():
    served = [*PPO[:4], "--remote_rm_url", "http://h:1/r", "--eval_dataset", "e", "--eval_steps"]
    made = settings_of("train_ppo_ray", *served, "10")
    assert (made["eval.every"], made["eval.temperature"], made["checkpoint.best"]) == (10, 0.6, "eval/score")
    never = settings_of("train_ppo_ray", *served, "-1")
    assert never["eval.every"] == 0
    assert "checkpoint.best" not in never
    key = "--ckpt.best_metric_key"
    assert "checkpoint.best" not in settings_of("train_ppo_ray", *served, "10", key, "none")
    assert settings_of("train_ppo_ray", *served, "10", key, "eval_default_pass1")["checkpoint.best"] == "eval/score"
    assert settings_of("train_ppo_ray", *served, "10", key, "eval_default_pass4")["checkpoint.best"] == "eval/pass@4"
    [note] = [note for note in translate("train_ppo_ray", [*served, "10", key, "loss"]).notes if key in note]
    assert "no best checkpoint is kept" in note
    assert settings_of("train_sft", *SFT, "--eval_dataset", "e")["eval.every"] == "epoch"
    assert settings_of("train_sft", *SFT, "--eval_dataset", "e", "--eval_steps", "7")["eval.every"] == 7


def test_sources_without_probabilities_follow_each_other():
    made = settings_of("train_sft", *SFT[:3], "a,b")
    assert {key: value for key, value in made.items() if key.startswith("data.sources")} == {
        "data.sources.s1.path": "a", "data.sources.s2.path": "b",
    }  # fmt: skip


def test_rewards_come_from_the_first_of_several_files():
    made = translate("train_ppo_ray", [*PPO[:4], "--remote_rm_url", "a.py,b.py"])
    assert made.words[-2:] == ["--env", "a.py"]
    assert any("rewards come from a.py alone" in note for note in made.notes)


def test_reward_models_are_placed_and_offloaded_as_they_say():
    made = settings_of("train_ppo_ray", *PPO, "--reward_num_nodes", "2", "--reward_num_gpus_per_node", "8")
    assert made["env.models"][0]["ranks"] == 16
    assert made["placement.reward.nodes"] == 2
    assert "roles.reference.workers.offload_parameters" not in settings_of("train_ppo_ray", *DOTTED, "--reward.offload")
    assert settings_of("train_ppo_ray", *DOTTED, "--reward.offload")["env.models"][0]["offload"]


def test_rows_of_preferences_have_fields_of_several_names(tmp_path):
    assert not [key for key in from_file(tmp_path, "train_dpo").settings if key.startswith("env.fields")]


GENERATE = [*SFT, "--output_path", "o", "--eval_task"]
SERVED = [*PPO[:4], "--remote_rm_url", "http://h:1/r", "--eval_dataset", "e", "--eval_steps", "10"]


@pytest.mark.parametrize(
    ("program", "flags", "note"),
    [
        ("train_sft", [*SFT[:3], "a,b", "--max_samples", "2"], "bounds the rows of each data set"),
        (
            "batch_inference",
            [*SFT, "--output_path", "o", "--eval_task", "generate", "--post_processor", "rs"],
            "rewards",
        ),
        ("train_ppo_ray", PPO, "completions have up to 1,024 tokens, as up to 0.9.7"),
        ("train_ppo_ray", [*SERVED, "--best_metric_key", "eval_gsm8k_pass1"], "that of all held-out tasks together"),
        ("train_ppo_ray", [*SERVED, "--best_metric_key", "eval_default_pass5"], "no best checkpoint is kept"),
        (
            "train_ppo_ray",
            [*PPO, "--advantage_estimator", "reinforce", "--freezing_actor_steps", "9"],
            "without a critic",
        ),
        ("train_dpo", [*SFT, "--train_split", "x"], "the training split up to 0.6.4"),
        ("train_ppo_ray", [*SERVED, "--normalize_reward"], "the rewards of a file or server are not normalised"),
        ("train_sft", [*SFT, "--eval_steps", "10"], "--eval_steps: nothing is evaluated without"),
        ("train_ppo_ray", [*PPO, "--eval_split", "test"], "--eval_split: nothing is evaluated without"),
        ("batch_inference", [*GENERATE, "generate_vllm", "--prompt_max_len", "9"], "a longer prompt is not cut"),
    ],
)
def test_a_difference_is_noted(program, flags, note):
    assert any(note in line for line in translate(program, flags).notes)


@pytest.mark.parametrize(
    ("program", "flags", "said"),
    [
        ("train_ppo_ray", [*PPO, "--partial_rollout"], "give --async_train too"),
        ("train_ppo", PPO, "train_ppo_ray is its successor"),
        ("train_ppo_ray", [*PPO, "--dynamic_filtering"], "--dynamic_filtering compares the completions of a prompt"),
        ("interactive_chat", ["--pretrain", "m"], "serve the model's folder with vLLM"),
        ("train_sft", [*SFT, "--eval_dataset", "a,b"], "--eval_dataset names several data sets"),
        ("train_sft", [*SFT[:3], "rows.py"], "scripts of data sets are not run"),
        ("train_sft", [*SFT[:3], "org/rows@folder"], "give the folder of the data set as a path"),
    ],
)
def test_what_cannot_be_theirs_is_refused(program, flags, said):
    with pytest.raises(ConfigError) as error:
        translate(program, flags)
    assert said in str(error.value)


def test_generation_without_vllm_is_by_transformers():
    assert translate("batch_inference", [*GENERATE, "generate"]).settings["engine.kind"] == "transformers"
    assert "engine.kind" not in translate("batch_inference", [*GENERATE, "generate_vllm"]).settings


@pytest.mark.parametrize("peft", [{"enabled": False, "r": 8}, {"r": 8, "use_peft": False}])
def test_an_adapter_that_is_switched_off_stays_off(tmp_path, peft):
    made = from_file(tmp_path, "train_dpo", {"peft": peft}, world_size=1)
    assert made.settings.get("lora.rank", 0) == 0
    assert made.result == "model"


def test_the_value_network_is_copied_beside_the_policy():
    made = translate("train_ppo_ray", [*PPO, "--save_value_network", "--save_path", "out"])
    assert {name: str(path) for name, path in made.copies.items()} == {"critic": "out_critic"}


def test_spaces_after_commas_are_no_part_of_a_path():
    made = settings_of("train_sft", *SFT[:3], "org/a, org/b")
    assert made["data.sources.s2.path"] == "org/b"


def test_earlier_spellings():
    assert settings_of("train_ppo_ray", *PPO, "--use_kl_estimator_k3")["learner.kl.estimator"] == "k3"
    assert settings_of("train_sft", *SFT, "--torch_compile")["workers.compile"] is True


def test_the_kl_of_verl_is_in_the_reward_or_in_the_loss(tmp_path):
    made = from_file(tmp_path, "train_ppo", {"ppo.use_kl_in_reward": True})
    keys = ("learner.kl.applied_to", "learner.kl.coef", "learner.kl.estimator")
    assert [made.settings[key] for key in keys] == ["reward", 0.001, "k1"]
    with pytest.raises(ConfigError, match="set one"):
        from_file(tmp_path, "train_grpo", {"ppo.use_kl_in_reward": True, "ppo.use_kl_loss": True})
    assert made.settings["learner.weight_decay"] == 0.01
    assert made.settings["learner.dual_clip"] == 3.0
