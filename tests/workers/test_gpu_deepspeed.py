"""The benchmark of DeepSpeed's settings on GPUs: its cases are settings there are, and it runs where there is none."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from envgym.learner import LearnerConfig
from envgym.workers.config import WorkersConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_deepspeed")


def test_every_case_is_settings_that_go_together(script):
    for name, case in script.CASES.items():
        learner = LearnerConfig(name="sft", **case.learner)
        WorkersConfig(ranks=2, **case.workers).check("actor", learner)
        reference = script.CASES[case.like]
        equal_keys = [key for key in ("optimizer", "muon_lr") if case.learner.get(key) != reference.learner.get(key)]
        assert not equal_keys, name
        assert case.workers.get("dtype") == reference.workers.get("dtype")


def test_differences_and_refusals_in_the_table(script):
    results = {
        "zero1": {"loss": [2.0, 1.0], "seconds_per_step": 0.5, "tokens_per_second": 100.0, "memory": 1.0},
        "zero2": {"loss": [2.0, 1.01], "seconds_per_step": 0.25, "tokens_per_second": 200.0, "memory": 0.5},
        "compile_zero1": {"refused": "no GPU"},
    }
    lines = [script.row_of(name, script.CASES[name], results) for name in results]
    assert lines[1] == ["zero2", "1.0100", "1.0e-02", "0.250", "200", "0.50"]
    assert lines[2] == ["compile_zero1", "no GPU", "", "", "", ""]


def test_conditions_are_noted_where_there_is_no_repository_and_no_such_package(script, monkeypatch, tmp_path):
    import record

    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (record.commit(), record.installed("no-such-package")) == ("unknown", "-")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.conditions(["pytest"])["commit"] == "unknown"


@pytest.mark.slow
def test_it_runs_without_a_gpu(script, tmp_path, monkeypatch, capsys):
    import record

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    sizes = ["--layers", "1", "--width", "64", "--steps", "2", "--rows", "4", "--length", "32"]
    cases = "zero1,zero2,offload_all,compile_zero1,muon_zero1,muon_zero3"
    monkeypatch.setattr(sys, "argv", ["gpu_deepspeed.py", "--cases", cases, *sizes])
    script.main()
    stored = json.loads((tmp_path / "gpu_deepspeed.json").read_text())
    assert "needs a GPU" in stored["cases"]["compile_zero1"]["refused"]
    ran = {name: case["loss"] for name, case in stored["cases"].items() if "loss" in case}
    assert ran.keys() == set(cases.split(",")) - {"compile_zero1"}
    for name, loss in ran.items():
        assert loss == pytest.approx(ran[script.CASES[name].like], rel=1e-5), name
    assert "| offload_all |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_steps_for_a_first_gpu_run_without_one(script, tmp_path):
    """At toy sizes; those that need vLLM's GPU build or a GPU are left to it."""
    first = importlib.import_module("gpu_first")
    names = ["placement", "turns", "speed", "prefixes", "loop_transformers"]
    verdicts = {name: result["verdict"] for name, result in first.results(names, "toy")}
    assert verdicts == dict.fromkeys(names, "ok")
    assert first.run_step("ipc", "toy")["verdict"] == "skipped"
