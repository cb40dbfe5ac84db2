"""The JSON that DeepSpeed is given, for each setting, and settings that contradict each other. Nothing is started."""

import sys

import pytest
import torch

from envgym.config.resolve import resolve
from envgym.errors import ConfigError, MissingDependency
from envgym.learner import LearnerConfig
from envgym.workers import zero
from envgym.workers.config import WorkersConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")

ALWAYS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": None}
FLOAT32 = {**ALWAYS, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
BFLOAT16 = {**ALWAYS, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
FLOAT16 = {**ALWAYS, "bf16": {"enabled": False}, "fp16": {"enabled": True}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
LEARNER = {"lr": 1e-5, "betas": (0.9, 0.98), "weight_decay": 0.1, "max_grad_norm": 0.5}
CLIPPED = {"gradient_clipping": 0.5}
PINNED = {"device": "cpu", "pin_memory": True}
PAGED = {"device": "cpu", "pin_memory": False}


def adamw(torch_adam=True, **more):
    params = {"lr": 1e-5, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": torch_adam, **more}
    return {"optimizer": {"type": "AdamW", "params": params}}


def stage(number, **settings):
    return {"zero_optimization": {"stage": number, **settings}}


def emitted(dtype=torch.float32, device=CPU, learner=None, **settings):
    config = LearnerConfig(name="any", **{**LEARNER, **learner}) if learner is not None else None
    return zero.config(WorkersConfig(**settings), config, dtype, device)


def test_without_deepspeed_the_extra_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependency, match=r"'deepspeed', which is not installed: .* -m pip install 'deepspeed"):
        zero._library()


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_zero_stages(number):
    assert emitted(learner={}, zero_stage=number) == FLOAT32 | stage(number) | CLIPPED | adamw()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_optimizer_offloaded(number, device):
    memory = PINNED if device is GPU else PAGED
    assert emitted(learner={}, device=device, zero_stage=number, offload_optimizer=True) == (
        FLOAT32 | stage(number, offload_optimizer=memory) | CLIPPED | adamw(torch_adam=device is CPU)
    )


def test_everything_offloaded():
    settings = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    assert emitted(torch.bfloat16, GPU, {}, **settings) == (
        BFLOAT16 | SUMS | stage(3, offload_param=PINNED, offload_optimizer=PINNED) | CLIPPED | adamw(torch_adam=False)
    )


@pytest.mark.parametrize(("number", "in_bfloat16", "in_float16"), [(0, 2, 1), (1, 2, 1), (2, 2, 2), (3, 3, 3)])
def test_16_bit_weights_have_float32_sums_and_master_weights(number, in_bfloat16, in_float16):
    for dtype, expected, runs_as in ((torch.bfloat16, BFLOAT16, in_bfloat16), (torch.float16, FLOAT16, in_float16)):
        assert emitted(dtype, learner={}, zero_stage=number) == expected | SUMS | stage(runs_as) | CLIPPED | adamw()


@pytest.mark.parametrize("settings", [{}, {"offload_optimizer": True}, {"compile": True}], ids=str)
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_setting_gets_an_optimizer_that_cannot_be_moved_or_compiled(dtype, number, settings):
    """DeepSpeed's own choice of its class, for a GPU. `BF16_Optimizer` has neither `offload_states` nor
    `get_param_id`."""
    from deepspeed.runtime import engine
    from deepspeed.runtime.config import DeepSpeedConfig

    zero.join_process_group(None, 0, 1, CPU)  # its configuration asks for the number of ranks
    chooser = object.__new__(engine.DeepSpeedEngine)
    chooser.__dict__["_config"] = DeepSpeedConfig(emitted(dtype, GPU, {}, zero_stage=number, **settings))
    optimizer = chooser._do_optimizer_sanity_check(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
    assert optimizer == (None if dtype == torch.float32 and not number else engine.ZERO_OPTIMIZATION)


def test_compiled():
    assert emitted(torch.bfloat16, GPU, {}, zero_stage=3, compile=True) == (
        BFLOAT16 | SUMS | stage(3) | {"compile": {"deepcompile": True}} | CLIPPED | adamw(fused=True)
    )


@pytest.mark.parametrize(("number", "settings"), [(0, {}), (2, {}), (3, {"reduce_scatter": False})])
def test_muon_is_not_clipped_and_made_by_us(number, settings):
    assert emitted(learner={"optimizer": "muon"}, zero_stage=number) == (
        FLOAT32 | stage(number, **settings) | {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zero_stage": 3}, FLOAT32 | stage(3)),
        ({"zero_stage": 3, "offload_parameters": True}, FLOAT32 | stage(3, offload_param=PAGED)),
        ({"zero_stage": 2, "offload_parameters": True}, FLOAT32 | stage(3, offload_param=PAGED)),
        ({"zero_stage": 3, "offload_optimizer": True, "compile": True}, FLOAT32 | stage(3)),
    ],
)
def test_a_model_that_only_scores_has_nothing_of_an_optimizer(settings, expected):
    assert emitted(**settings) == expected


def test_raw_json_wins_key_by_key():
    raw = {"zero_optimization": {"reduce_bucket_size": 1000}, "gradient_clipping": 3.0, "wall_clock_breakdown": True}
    assert emitted(learner={}, zero_stage=2, deepspeed=raw) == (
        FLOAT32 | stage(2, reduce_bucket_size=1000) | adamw() | {"gradient_clipping": 3.0, "wall_clock_breakdown": True}
    )
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    assert emitted(learner={}, deepspeed=sgd)["optimizer"] == sgd["optimizer"]


def test_deepspeed_knows_every_key_that_is_emitted():
    """Its own reader refuses unknown keys within `zero_optimization`, and an unknown key elsewhere it would ignore."""
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config_of_all = emitted(torch.float16, GPU, {}, zero_stage=3, offload_optimizer=True, offload_parameters=True)
    config_of_all |= emitted(torch.float32, GPU, {"optimizer": "muon"}, zero_stage=3, compile=True)
    assert DeepSpeedZeroConfig(**config_of_all["zero_optimization"]).stage == 3
    known_values = {
        value for module in (config, constants) for value in vars(module).values() if isinstance(value, str)
    }
    known_values |= {"compile", "zero_optimization"}
    assert config_of_all.keys() <= known_values


# -- contradictions ---------------------------------------------------------------------------------------

GROUP = {"env": "math_verify", "learner": "grpo"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": {"offload_optimizer": True}}, r"workers\.offload_optimizer needs workers\.zero_stage 1, 2 or 3"),
        ({"workers": {"compile": True}}, r"workers\.compile needs workers\.zero_stage 1, 2 or 3"),
        ({"workers": {"deepspeed": {"zero_optimization": {"stage": 1}}}}, r"set workers\.zero_stage instead"),
        (
            {"workers": {"offload_parameters": True, "zero_stage": 2}},
            r"workers\.offload_parameters of the actor, which is trained, needs workers\.zero_stage=3, not 2",
        ),
        ({"roles": {"actor": {"workers": {"offload_optimizer": True}}}}, r"workers\.offload_optimizer needs"),
        (
            {
                "learner": {"name": "grpo", "optimizer": "muon"},
                "workers": {"deepspeed": {"optimizer": {"type": "Lion", "params": {}}}},
            },
            r"learner\.optimizer=muon and an optimizer in workers\.deepspeed",
        ),
        (
            {"learner": {"name": "grpo", "optimizer": "muon"}, "workers": {"compile": True, "zero_stage": 2}},
            r"workers\.compile and learner\.optimizer=muon",
        ),
        ({"learner": {"name": "grpo", "muon_lr": 0.1}}, "muon_lr is for optimizer=muon"),
        ({"learner": {"name": "grpo", "muon_lr": 0.1, "optimizer": "muon", "lr": 0}}, "muon_lr follows the schedule"),
        ({"learner": {"name": "grpo", "warmup_ratio": 0.1, "warmup_steps": 3}}, "set one of them"),
        ({"learner": {"name": "grpo", "freeze": ["lm_head", "("]}}, r"'\(' is no regular expression"),
        ({"learner": {"name": "grpo", "ema_decay": 1.0}}, "ema_decay"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve({**GROUP, **settings})
    assert "\n" not in str(caught.value)


def test_a_role_that_only_scores_may_be_offloaded_by_itself():
    learner = {"name": "grpo", "kl": {"coef": 0.01}}
    stage = resolve(
        {
            **GROUP,
            "learner": learner,
            "roles": {"reference": {"workers": {"offload_parameters": True}}},
            "workers": {"zero_stage": 2, "offload_optimizer": True},
        }
    ).stages[0]
    assert stage.workers_of("reference").partitions(trained=False)
    assert not stage.workers_of("actor").partitions(trained=True)
