"""Environments that are broken on purpose: each fails the check for its own reason, and no other.

The animals are in `zoo/`. The quick tests ask most of them one question, in this process; the slow ones examine
each as a whole, as `envgym envs check` does.
"""

import asyncio
from pathlib import Path

import pytest

from envgym.check import CheckVerdict, Finding, check_environment
from envgym.check.run import GROUPS
from envgym.check.subject import Subject
from envgym.errors import EnvgymError
from envgym.registry import spec
from envgym.services import start_services

ZOO = Path(__file__).with_name("zoo")
CHECKS = [check for group in GROUPS for check in group]

FAILING = {
    "tasks.py:OverlappingSplits": ("splits", "10 of 40 held-out tasks are also among 60"),
    "returns.py:TextReward": ("types", "a reward is a number or None, not '1.0'"),
    "returns.py:HoldsTheLoopForGood": ("episodes", "blocked permanently in step"),
    "returns.py:SwallowsItsEnd": ("episodes", "step still runs 0.2 s after it was cancelled"),
    "returns.py:CancelsATask": ("episodes", "step raised CancelledError"),
    "repeats.py:IgnoresItsSeed": ("seed", "lucky number is"),
    "repeats.py:SharedSecret": ("isolation", "with concurrent episodes"),
    "rewards.py:PaysForSilence": ("trivial answers", "an empty answer gets the full score"),
    "endings.py:LeavesAProcess": ("left behind", "processes (sleep 1000)"),
    "tasks.py:SettingsThatGrow": ("settings", '"size": 4'),
    "tasks.py:DuplicateIds": ("tasks", "ids of train that several tasks have: 21"),
    "returns.py:TrustsThePolicy": ("episodes", "step raised ValueError: invalid literal for int()"),
    "repeats.py:GlobalGenerator": ("generators", "(random)"),
    "rewards.py:WrongDemonstrations": ("demonstrations", "scores 0.00"),
    "endings.py:CloseRaises": ("close", "RuntimeError('cannot close')"),
    "tasks.py:UnserialisableSettings": ("settings", "cannot be written as JSON"),
    "tasks.py:TasksThatChange": ("tasks", "differ when read again"),
    "tasks.py:TasksThatAreNoData": ("tasks", "set is not JSON serializable"),
    "tasks.py:TasksWithoutEnd": ("tasks", "get(90) of train raises no IndexError"),
    "tasks.py:NoTasks": ("tasks", "train: 0, test: 0"),
    "tasks.py:ChangingFingerprint": ("fingerprints", "'spec': '0'"),
    "returns.py:NanReward": ("types", "a reward must be finite, not nan"),
    "returns.py:ScoreOfTwo": ("types", "a score lies in [0, 1], not at 2"),
    "returns.py:FourTuple": ("types", "(observation, reward, terminated, truncated, info)"),
    "returns.py:NumberAsObservation": ("types", "not int"),
    "returns.py:SaysNothing": ("types", "the first observation is empty"),
    "returns.py:NoInfo": ("types", "reset must return (observation, info)"),
    "returns.py:WordAsFlag": ("types", "'yes' as terminated"),
    "returns.py:NanMetric": ("types", "metrics that are not finite numbers"),
    "returns.py:RaisesInReset": ("episodes", f"reset raised KeyError: 'question' ({ZOO}/returns.py, line "),
    "returns.py:ForgetsToAwait": ("types", "a reward is a number or None, not a coroutine: an await is missing before"),
    "returns.py:ForgetsToAwaitInReset": ("types", "not a coroutine: an await is missing before fetch(…)"),
    "returns.py:ForgetsToAwaitInMessages": ("types", "not a coroutine: an await is missing before fetch(…)"),
    "returns.py:ForgetsToAwaitInAList": ("types", "not a coroutine: an await is missing before fetch(…)"),
    "returns.py:ForgetsToAwaitInAMessage": ("episodes", "reset raised TypeError: the content of a message is text"),
    "returns.py:ForgetsToAwaitInInfo": ("types", "not a coroutine: an await is missing before fetch(…)"),
    "returns.py:ForgetsToAwaitAtTheEnd": ("types", "not a coroutine: an await is missing before grade(…)"),
    "returns.py:ForgetsToAwaitAtALimit": ("types", "not a coroutine: an await is missing before grade(…)"),
    "returns.py:ForgetsToAwaitInStepsInfo": ("types", "not a coroutine: an await is missing before grade(…)"),
    "returns.py:RaisesAfterAWhile": ("episodes", "in turn 2: step raised KeyError: 'second'"),
    "returns.py:HangsInReset": ("episodes", "reset took longer than 1 s"),
    "returns.py:HangsOnItsThread": ("episodes", "step took longer than 1 s"),
    "returns.py:EndsTheProcess": ("episodes", "the process ended: giving up"),
    "returns.py:Exits": ("episodes", "usage: grade.py ANSWER"),
    "repeats.py:EndsByChance": ("seed", ""),
    "repeats.py:RemembersEpisodes": ("seed", "observation of turn 1"),
    "repeats.py:SameProblemForAll": ("problems", "posed the same problem"),
    "repeats.py:SeedsTheGlobalGenerator": ("generators", "draws from or seeds"),
    "repeats.py:NumpyGenerator": ("generators", "(numpy.random)"),
    "repeats.py:OrderOfASet": ("process", "another in another process"),
    "repeats.py:SharedOnTheSpec": ("isolation", "with concurrent episodes"),
    "repeats.py:SharesItsTries": ("fork", "a fork before turn 1 and its instance differ: observation of turn 2: "),
    "repeats.py:ForksItself": ("fork", "ForksItself: fork must return another ForksItself, not "),
    "repeats.py:ChangesTheFolder": ("surroundings", "working directory"),
    "repeats.py:WritesVariables": ("surroundings", "environment variable PROBLEM"),
    "repeats.py:ResetsHalf": ("after the end", "gives another episode than a new one"),
    "rewards.py:NeverRewards": ("reward range", "no reward in any of"),
    "rewards.py:JudgesNoSilence": ("reward range", "score_group raised IndexError: list index out of range"),
    "rewards.py:DemonstrationsThatRaise": ("demonstrations", "KeyError: 'solution'"),
    "rewards.py:FindsTheAnswerAnywhere": ("trivial answers", "the prompt repeated gets the full score"),
    "endings.py:LeavesAFile": ("left behind", "6 open files more"),
    "endings.py:LeavesAPool": ("left behind", "processes (sleep 1000)"),
    "endings.py:CloseNeedsAReset": ("close", "no attribute 'task'"),
    "endings.py:CloseHangs": ("episodes", "close took longer than"),
    "endings.py:NoSchema": ("tools", "there is no type 'str'"),
    "endings.py:TrustsToolCalls": ("tools", "KeyError: 'no_such_tool'"),
}
NEED_A_PROCESS = {
    "returns.py:HoldsTheLoopForGood", "returns.py:SwallowsItsEnd", "returns.py:HangsInReset",
    "returns.py:HangsOnItsThread", "returns.py:EndsTheProcess", "repeats.py:OrderOfASet",
    "repeats.py:WritesVariables", "endings.py:LeavesAProcess", "endings.py:LeavesAFile", "endings.py:LeavesAPool",
    "endings.py:CloseHangs",
}  # fmt: skip
"""Animals that would end this process, hold it up, or leave something in it."""
QUICK = {"returns.py:HoldsTheLoopForGood", "repeats.py:OrderOfASet", "endings.py:LeavesAProcess"}
"""Examined as a whole in the quick tests too, for what only processes have."""
WARNED_OF = {
    "returns.py:NeverEnds": ("episodes", "none ended within 30 turns"),
    "rewards.py:NeverPays": ("reward range", "no completion that was tried was rewarded"),
    "rewards.py:PaysTooMuch": ("reward range", "from -5 to 100"),
    "rewards.py:PaysForEffort": ("trivial answers", "gets a mean score of 0.60"),
    "rewards.py:FindsTheAnswerAnywhere": ("leak", "in the observation in 100%"),
    "rewards.py:LeaksInThePrompt": ("leak", "in the observation in 100% of 90 tasks"),
    "rewards.py:LeaksInATool": ("leak", "in the observation in 100%"),
}


def examine(animal, **settings):
    if "Settings" in animal:
        settings["size"] = 3
    return asyncio.run(check_environment(f"{ZOO}/{animal}", settings))


def finding(report, check) -> Finding:
    (found,) = [finding for finding in report.findings if finding.check == check]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("animal", ["healthy.py:Sums", "healthy.py:BlockingSums"])
def test_a_healthy_one_passes_every_check(animal):
    report = examine(animal)
    assert [str(finding) for finding in report.findings if finding.verdict not in ("ok", "not applicable")] == []
    assert [f.check for f in report.findings if f.verdict is CheckVerdict.NOT_APPLICABLE] == ["tools"]
    assert [finding.check for finding in report.findings] == CHECKS


@pytest.mark.parametrize(
    "animal", [animal if animal in QUICK else pytest.param(animal, marks=pytest.mark.slow) for animal in FAILING]
)
def test_each_fails_for_its_own_reason(animal):
    check, said = FAILING[animal]
    report = examine(animal)
    assert not report.passed
    failed = {f.check for f in report.findings if f.verdict is CheckVerdict.FAILED}
    assert failed == {check}, "\n".join(map(str, report.findings))
    assert said in finding(report, check).message
    assert finding(report, check).advice
    assert not any("(episodes)" in finding.message for finding in report.findings)  # nothing repeats it
    if animal == "returns.py:HoldsTheLoopForGood":
        assert report.findings[-1].check == "episodes"


def test_the_advice_on_a_reset_that_raises_is_about_resets():
    assert "reset may not raise" in ask("returns.py:RaisesInReset", "episodes").advice


def ask(animal, check, verdict=CheckVerdict.OK):
    """The finding of one check, in this process, as if all before it had this verdict."""
    settings = {"size": 3} if "Settings" in animal else {}
    [(group, run)] = [(group, run) for group, run in GROUPS.items() if check in group]

    async def main():
        subject = Subject(spec(f"{ZOO}/{animal}", **settings), f"{ZOO}/{animal}", settings)
        subject.verdicts = dict.fromkeys(CHECKS, verdict)
        async with start_services(subject.spec):
            return dict(zip(group, await run(subject), strict=True))[check]

    return asyncio.run(main())


QUESTIONS = [(animal, *FAILING[animal], CheckVerdict.FAILED) for animal in FAILING if animal not in NEED_A_PROCESS]
QUESTIONS += [
    ("rewards.py:NeverEndsNorRewards", "reward range", "of which none came to an end", CheckVerdict.FAILED),
    ("rewards.py:RaisesOrNeverRewards", "reward range", "no reward in any of", CheckVerdict.FAILED),
]
QUESTIONS += [
    (animal, *asked, CheckVerdict.WARNING) for animal, asked in WARNED_OF.items() if asked[0] != "reward range"
]


@pytest.mark.parametrize(("animal", "check", "said", "verdict"), QUESTIONS)
def test_the_check_that_looks_for_it_finds_it(animal, check, said, verdict):
    found = ask(animal, check)
    assert found.verdict is verdict
    assert said in found.message
    assert found.advice


def test_an_episode_that_was_not_compared_after_a_reset_is_not_called_the_same():
    assert "behaves as a new one" in ask("healthy.py:Sums", "after the end").message
    assert "was not compared" in ask("repeats.py:ResetsHalf", "after the end", CheckVerdict.WARNING).message


def test_slow_calls_are_a_warning(monkeypatch):
    monkeypatch.setattr("envgym.check.episodes.SLOW_SECONDS", 0.0)
    found = ask("healthy.py:Sums", "latency")
    assert found.verdict is CheckVerdict.WARNING
    assert "EnvSpec.setup" in found.advice


def test_a_healthy_one_gives_each_check_nothing_to_find():
    """But for the comparison with another process."""
    found = {check: ask("healthy.py:Sums", check) for group in GROUPS for check in group[:1] if check != "process"}
    assert {check: finding.verdict for check, finding in found.items()} == dict.fromkeys(found, CheckVerdict.OK)


def test_every_check_has_an_animal_that_fails_it():
    """But for those that only ever warn."""
    assert {check for check, _ in FAILING.values()} == set(CHECKS) - {"latency", "leak"}


@pytest.mark.slow
@pytest.mark.parametrize("animal", WARNED_OF)
def test_what_may_be_meant_is_a_warning(animal):
    check, said = WARNED_OF[animal]
    report = examine(animal)
    assert finding(report, check).verdict is CheckVerdict.WARNING
    assert said in finding(report, check).message


def test_a_set_up_that_does_not_end_is_said_and_nothing_is_left(tmp_path):
    name = f"{ZOO}/endings.py:WaitsForever"
    with pytest.raises(EnvgymError, match=r"cannot be set up: .* in setup \(.*endings\.py, line \d+\)"):
        asyncio.run(check_environment(name, setup_seconds=0.5))
