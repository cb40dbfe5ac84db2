"""A decorated function is a complete environment."""

import asyncio
import functools
import json
import operator
import pickle
import subprocess
import sys
import threading
import time

import pytest

import envgym
from envgym import registry
from envgym.env.rewards import last_action
from envgym.errors import ConfigError, DataError, InvalidStep, NameNotFound
from envgym.loading import target_of
from envgym.types import Action, Episode, Message, Observation, Outcome, Status, StopReason, Task

TASK = Task("t", prompt="What is 40 + 2?", answer="42", fields={"hint": "add", "level": 3})


def spec_of(function, **settings):
    return function.__environment__("mine", **settings)


def step(spec, text="The answer is 42", task=TASK):
    """Pose `task` and give one answer; the step's result."""

    async def main():
        async with spec:
            env = spec.make()
            async with env:
                observation, _ = await env.reset(options={"task": task})
                return observation, await env.step(envgym.Action(text, (1, 2), stop_reason=StopReason.LENGTH))

    return asyncio.run(asyncio.wait_for(main(), 60))


def given(**tasks):
    return envgym.reward(tasks=[{"prompt": f"say {index}", "answer": index} for index in range(20)], **tasks)


# -- what it takes -------------------------------------------------------------------------------------------


def test_arguments_come_by_name():
    seen = {}

    @given()
    def everything(level, completion, prompt, answer, hint, task, messages, action, missing="default"):
        seen.update(locals())
        return 0.5

    with pytest.raises(ConfigError, match=r"takes 'level'"):
        step(spec_of(everything))  # the rows that are its own have no such field
    everything.__environment__.rows = [{"prompt": "p", "answer": 1, "hint": "", "level": 0}] * 2
    observation, result = step(spec_of(everything))
    assert result == (Observation(), 0.5, True, False, {"score": None, "metrics": {}})
    assert observation.messages == (Message("user", "What is 40 + 2?"),)
    assert (seen["level"], seen["completion"], seen["prompt"]) == (3, "The answer is 42", "What is 40 + 2?")
    assert (seen["answer"], seen["hint"], seen["task"], seen["missing"]) == ("42", "add", TASK, "default")
    assert [(m.role, m.text) for m in seen["messages"]] == [
        ("user", "What is 40 + 2?"),
        ("assistant", "The answer is 42"),
    ]
    assert (tuple(seen["action"].token_ids), seen["action"].stop_reason) == ((1, 2), StopReason.LENGTH)


def test_fields_that_became_prompt_and_answer_keep_their_names(write):
    data = write(
        "\n".join(json.dumps({"frage": f"{n}?", "solution": str(n), "tag": "x"}) for n in range(20)), "rows.jsonl"
    )

    @envgym.reward
    def both(completion, frage, solution, tag):
        return float((frage, completion, tag) == (f"{solution}?", solution, "x"))

    spec = spec_of(both, data={"path": str(data), "prompt": "frage"})

    async def main():
        async with spec:
            return await spec.tasks("test").get(0)

    task = asyncio.run(main())
    assert step(spec, text=task.answer, task=task)[1][1] == 1.0


def test_any_field_at_all():
    @given()
    def any_field(completion, **fields):
        return float(fields["hint"] == "add" and fields["answer"] == "42" and "completion" not in fields)

    assert step(spec_of(any_field))[1][1] == 1.0


def test_a_name_that_nothing_has_is_told_with_its_nearest():
    @given()
    def misspelt(completon):
        return 1.0

    with pytest.raises(ConfigError, match=r"misspelt takes 'completon', .* Did you mean 'completion'\?") as error:
        step(spec_of(misspelt))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["answer", "solution"])
def test_an_answer_that_the_data_call_otherwise_is_asked_for(write, name):
    """It used to be None, which any comparison with it then was wrong for."""
    rows = [{"prompt": f"p{index}", "gold label": "1"} for index in range(30)]
    data = write("\n".join(map(json.dumps, rows)), "rows.jsonl")
    function = {"answer": lambda completion, answer: 1.0, "solution": lambda completion, solution: float(solution)}[
        name
    ]
    function.__name__ = "right"
    says = rf"right takes '{name}', and the tasks have no answer: set data.answer=FIELD .* \(they have 'gold label'\)"
    with pytest.raises(ConfigError, match=says):
        step(spec_of(envgym.reward(function), data={"path": str(data)}))
    spec = spec_of(envgym.reward(function), data={"path": str(data), "answer": "gold label"})
    assert step(spec, task=Task("t", prompt="p", answer="1"))[1][1] == 1.0
    function.__environment__.rows = rows
    with pytest.raises(ConfigError, match=r"have no answer: name their field 'answer'"):
        step(spec_of(function))


@pytest.mark.parametrize("text", ["answer", "completions, answer"])
def test_a_null_answer_of_single_rows_is_none(write, play, text):
    """As TRL passes it; also where the first row has none."""
    answers = [None, "1", None, "1", "1"] * 9
    data = write("\n".join(json.dumps({"prompt": f"p{n}", "answer": a}) for n, a in enumerate(answers)), "rows.jsonl")
    result = "[float(a is None) for a in answer]" if "completions" in text else "answer is None"
    names = {}
    exec(f"def seen(completion, {text}): return {result}", names)
    spec = spec_of(envgym.reward(names["seen"]), data={"path": str(data), "test_fraction": 0.0})
    groups = play(spec, [Task("t", prompt="p"), Task("u", prompt="p", answer="1")])
    assert [episode.reward for group in groups for episode in group.episodes] == [1.0] * 3 + [0.0] * 3


@pytest.mark.parametrize("name", ["task", "action", "messages"])
def test_a_field_with_the_name_of_an_argument_is_told_apart(name):
    """The argument hid the field without a word, and every row earned 0."""
    rows = [{"prompt": f"p{n}", name: "sort"} for n in range(2)]
    task = Task("t", prompt="p", fields={name: "sort"})
    names = {}
    exec(f"def plain(completion, {name}): return float({name} == 'sort')", names)
    exec(f"def both(completion, {name}, fields): return float(fields['{name}'] == 'sort' != {name})", names)
    exec(f"def rest(completion, **kwargs): return float(kwargs['{name}'] == 'sort')", names)
    says = (
        rf"plain takes '{name}', which is a field .* add the parameter `fields`, then fields\['{name}'\] is the row's"
    )
    with pytest.raises(ConfigError, match=says):
        step(spec_of(envgym.reward(names["plain"], tasks=rows)), task=task)
    spec = spec_of(envgym.reward(names["plain"], tasks=[{"prompt": "p"}, {"prompt": "q"}]))
    with pytest.raises(ConfigError, match=says):  # of a later row
        step(spec, task=task)
    for function in ("both", "rest"):
        assert step(spec_of(envgym.reward(names[function], tasks=rows)), task=task)[1][1] == 1.0


def test_a_field_that_is_called_fields_is_a_field():
    @envgym.reward(tasks=[{"prompt": "p", "fields": "x"}] * 2)
    def plain(completion, fields):
        return float(fields == "x")

    assert step(spec_of(plain), task=Task("t", prompt="p", fields={"fields": "x"}))[1][1] == 1.0


@pytest.mark.parametrize("name", ["response", "output", "solution", "generation", "text", "solution_str"])
def test_another_name_of_the_completion_is_told_its_own(name):
    """`response`, `output` and `solution` name the answer in data: the answer was compared with itself."""
    names = {}
    exec(f"def right({name}, answer): return float({name} == answer)", names)
    exec(f"def both(completion, {name}): return float({name} == '42' == completion)", names)
    exec(f"def rest({name}, **kwargs): return float({name} == '42' == kwargs['completion'])", names)
    rows = [{"prompt": "p", "answer": "42", name: "42"}] * 2
    task = Task("t", prompt="p", answer="42", fields={name: "42"})
    for tasks in (rows, [{"prompt": "p", "answer": "42"}] * 2):
        with pytest.raises(ConfigError, match=rf"right takes '{name}', .*: the completion's parameter is `completion`"):
            step(spec_of(envgym.reward(names["right"], tasks=tasks)), task=task)
    for function in ("both", "rest"):
        assert step(spec_of(envgym.reward(names[function], tasks=rows)), text="42", task=task)[1][1] == 1.0


def test_an_answer_with_a_default_may_be_missing():
    @envgym.reward(tasks=[{"prompt": "p"}, {"prompt": "q"}])
    def any_answer(completion, answer=None):
        return float(answer is None)

    assert step(spec_of(any_answer), task=Task("t", prompt="p"))[1][1] == 1.0


def test_no_field_is_proposed_that_no_parameter_can_be_called():
    @envgym.reward(tasks=[{"prompt": "p", "gold label": "1", "class": 2}] * 2)
    def graded(completion, gold_label):
        return 1.0

    with pytest.raises(ConfigError, match=r"has 'gold label', 'class', which cannot be parameters\)\.$"):
        step(spec_of(graded))


def test_a_row_without_the_field_fails_that_task_alone():
    @envgym.reward(tasks=[{"prompt": "p", "hint": "h"}, {"prompt": "q", "hint": "h"}])
    def hinted(hint):
        return 1.0

    with pytest.raises(DataError, match="task u has no field 'hint', which hinted takes"):
        step(spec_of(hinted), task=Task("u", prompt="?"))


@pytest.mark.parametrize("text", ["def f(completion, /): ...", "def f(*completion): ..."])
def test_what_cannot_be_given_by_name_is_refused_at_once(text):
    names = {}
    exec(text, names)
    with pytest.raises(ConfigError, match="reward function f: 'completion' cannot be given by name"):
        envgym.reward(names["f"])


# -- what it returns -----------------------------------------------------------------------------------------


class Tensor:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


@pytest.mark.parametrize(
    ("returned", "reward", "score", "metrics"),
    [
        (1, 1.0, None, {}),
        (True, 1.0, None, {}),
        (Tensor(0.25), 0.25, None, {}),
        (None, None, None, {}),
        (envgym.Reward(2.0, score=0.5, metrics={"words": 3, "bad": float("nan")}), 2.0, 0.5,
         {"words": 3.0, "invalid_metrics": 1.0}),
        ({"reward": -1, "score": 0.0}, -1.0, 0.0, {}),
        ({"reward": None, "metrics": {"words": 1}}, None, None, {"words": 1.0}),
        ({"score": -1.0, "acc": False, "pred": "7"}, -1.0, None, {"acc": 0.0}),  # verl's DAPO
        ({"score": 0.5, "correctness": Tensor(1.0), "pred": None, "spans": [1]}, 0.5, None, {"correctness": 1.0}),
        ({"score": None, "metrics": {"words": 1}, "acc": 1}, None, None, {"acc": 1.0, "words": 1.0}),
        ({"overall": 1.9, "format": 1.0, "details": {"a": 1}}, 1.9, None, {"format": 1.0}),  # EasyR1's
        ({"reward": 2, "score": 0.5, "acc": 1}, 2.0, 0.5, {"acc": 1.0}),
        ((0.75, True), 0.75, None, {"correct": 1.0}),  # NeMo-RL's
        ((0.75, None), 0.75, None, {}),
        ((None, {"words": 3, "text": "x"}), None, None, {"words": 3.0}),
        ((True, False, "7"), 1.0, None, {}),
    ],
)  # fmt: skip
def test_what_it_may_return(returned, reward, score, metrics):
    @given()
    def says(completion):
        return returned

    _, (_, got, terminated, _, info) = step(spec_of(says))
    assert (got, terminated, info) == (reward, True, {"score": score, "metrics": metrics})


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("1", "says returned '1': it must be a finite number or None"),
        (float("nan"), "says returned nan"),
        ([1.0], r"says returned \[1.0\]"),
        ({"acc": 1.0}, r"a mapping without 'reward' \(or 'score' or 'overall'\)"),
        ({"score": "high"}, "the reward 'high': it must be a finite number"),
        (("x", True), "the reward 'x': it must be a finite number"),
        ((), r"says returned \(\)"),
        ({"reward": 1.0, "metric": {}}, r"a mapping with 'metric'; .* Did you mean 'metrics'\?"),
        (envgym.Reward(1.0, score=1.5), r"the score 1.5: a score lies in \[0, 1\]"),
    ],
)
def test_what_it_may_not(returned, says):
    @given()
    def says_(completion):
        return returned

    says_.__environment__.function.__name__ = "says"
    with pytest.raises(InvalidStep, match=says):
        step(spec_of(says_))


# -- how it is called ----------------------------------------------------------------------------------------


def test_a_plain_function_never_blocks_the_loop_and_an_asynchronous_one_shares_it():
    """Each of fifty waits until all fifty have begun."""
    threads, on_threads, on_the_loop = [], threading.Barrier(50), asyncio.Barrier(50)

    @given()
    def slow(completion):
        threads.append(threading.current_thread())
        on_threads.wait(60)
        return 1.0

    @given()
    async def asynchronous(completion):
        threads.append(threading.current_thread())
        await on_the_loop.wait()
        return 1.0

    async def main(spec):
        async def one():
            async with spec.make() as env:
                await env.reset(options={"task": TASK})
                return (await env.step(envgym.Action("x")))[1]

        async with spec, asyncio.timeout(60):
            assert await asyncio.gather(*(one() for _ in range(50))) == [1.0] * 50

    asyncio.run(main(spec_of(slow)))
    assert threading.main_thread() not in threads
    assert len(set(threads)) == 50
    threads.clear()
    asyncio.run(main(spec_of(asynchronous)))
    assert set(threads) == {threading.main_thread()}


def test_a_plain_function_may_run_a_loop_of_its_own():
    @given()
    def loops(completion):
        return asyncio.run(asyncio.sleep(0, 0.5))

    assert step(spec_of(loops))[1][1] == 0.5


PROCESSES = """
import asyncio, os, random, sys, time
import envgym

@envgym.reward(tasks=[{"prompt": "a"}, {"prompt": "b"}])
def one(completion):
    while completion == "hang":
        time.sleep(1)
    if completion == "die":
        os._exit(3)
    return {"reward": asyncio.run(asyncio.sleep(0, 0.5)), "metrics": {"pid": os.getpid()}}

@envgym.reward(tasks=[{"prompt": "a"}, {"prompt": "b"}])
async def asynchronous(completion):
    await asyncio.sleep(0)
    return os.getpid()

@envgym.reward(tasks=[{"prompt": "a"}, {"prompt": "b"}], batch=True)
def many(completion):
    return [{"reward": random.random(), "metrics": {"pid": os.getpid()}} for _ in completion]
"""


def test_in_processes_of_its_own_what_hangs_is_killed(write, monkeypatch):
    """A sign of life is asked of a process whose caller gave up; one that gives none is replaced."""
    monkeypatch.setattr("envgym.processes.pool.PING_SECONDS", 0.5)
    spec = registry.spec(f"{write(PROCESSES)}:one", processes=1, call_timeout=3.0)

    async def main():
        async def answer(text):
            async with spec.make() as env:
                await env.reset(options={"task": TASK})
                try:
                    return (await env.step(envgym.Action(text)))[4]["metrics"]["pid"]
                except Exception as error:
                    return f"{type(error).__name__} {error}"

        async with spec:
            return [await answer(text) for text in ("x", "hang", "x", "die", "x")]

    first, hung, second, died, third = asyncio.run(main())
    assert len({first, second, third}) == 3
    assert "CallTimeout" in hung
    assert "exit status 3" in died


def test_asynchronous_in_a_process_and_one_that_cannot_be_found_there(write):
    spec = registry.spec(f"{write(PROCESSES)}:asynchronous", processes=1)
    assert step(spec)[1][1] > 1

    @given()
    def local(completion):
        return 1.0

    with pytest.raises(ConfigError, match=r"local is no top-level name of .*: define it at the top level of a file"):
        step(spec_of(local, processes=1))


# -- tasks ---------------------------------------------------------------------------------------------------


def all_tasks(spec, split):
    async def main():
        async with spec:
            tasks = spec.tasks(split)
            return [await tasks.get(index) for index in range(tasks.size)]

    return asyncio.run(main())


def test_tasks_given_in_a_list_are_split_by_prompt():
    spec = spec_of(given()(lambda completion: 1.0))
    train, test = all_tasks(spec, "train"), all_tasks(spec, "test")
    assert len(train) + len(test) == 20
    assert test
    assert not {task.prompt for task in train} & {task.prompt for task in test}
    assert train[0].answer in range(20)


def test_a_single_prompt_is_for_training():
    spec = spec_of(envgym.reward(lambda completion: 1.0, tasks=[{"question": "only"}] * 2))
    assert (len(spec.tasks("train")), len(spec.tasks("test"))) == (2, 0)


@pytest.mark.parametrize("tasks", ["rows.jsonl", ["a", "b"], {"question": "a"}])
def test_tasks_that_are_no_mappings_are_an_error_in_one_line(tasks):
    spec = spec_of(envgym.reward(lambda completion: 1.0, tasks=tasks))
    with pytest.raises(DataError, match="tasks=… is a list of mappings, or a function of the split; it has '"):
        spec.tasks("train")


@pytest.mark.parametrize("function", [int, 3, "f", ["f"]])
def test_only_what_can_be_called_scores(function):
    with pytest.raises(ConfigError, match="takes a function, or a list of them, not"):
        envgym.reward(function)


def test_a_class_is_no_reward_but_its_instances_are():
    with pytest.raises(ConfigError, match=r"not <class '.*Exact'>: write an instance, Exact\(…\)"):
        envgym.reward(Exact)
    with pytest.raises(ConfigError, match=r"the parameters of .* cannot be read: call it in a function of your own"):
        envgym.reward(operator.itemgetter(0))


# -- any callable --------------------------------------------------------------------------------------------


class Exact:
    """The answer itself, worth `value`."""

    def __init__(self, value):
        self.value = value

    def __call__(self, completion, answer):
        return self.value * (completion == str(answer))

    def as_method(self, completion, answer):
        return self(completion, answer)

    @functools.lru_cache  # noqa: B019
    def cached(completion, answer):
        return 2.0 * (completion == str(answer))


class ExactLater(Exact):
    async def __call__(self, completion, answer):
        await asyncio.sleep(0)
        return self.value * (completion == str(answer))


def scaled(completion, answer, value=1.0, **fields):
    assert "level" not in fields or fields["level"] == "bound"
    return value * (completion == str(answer))


CALLABLES = {
    "Exact": Exact(2.0),
    "ExactLater": ExactLater(2.0),
    "as_method": Exact(2.0).as_method,
    "cached": Exact.cached,
    "scaled": functools.partial(scaled, value=2.0, level="bound"),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_any_callable_is_a_reward(name):
    function = envgym.reward(CALLABLES[name], tasks=[{"prompt": "p", "answer": 42, "value": 7}] * 2)
    assert function.__name__ == name
    task = Task("t", prompt="p", answer="42", fields={"value": 7, "level": 3})  # what is bound stays bound
    assert step(spec_of(function), text="42", task=task)[1][1] == 2.0
    assert step(spec_of(function), text="43", task=task)[1][1] == 0.0
    if name == "Exact":
        assert function("42", answer=42) == 2.0
        assert type(spec_of(function)).__doc__ == "The answer itself, worth `value`."


def test_two_partials_of_one_function_are_summed_under_numbered_names(play):
    parts = [functools.partial(scaled, value=2.0), functools.partial(scaled, value=3.0), ExactLater(1.0)]
    [group] = play(spec_of(envgym.reward(parts, tasks=[{"prompt": "p", "answer": 42}] * 2)), None, ("42", ""))
    assert [episode.reward for episode in group.episodes] == [6.0, 0.0]
    assert group.episodes[0].metrics == {"scaled_1": 2.0, "scaled_2": 3.0, "ExactLater": 1.0}


def test_what_is_not_given_needs_no_name():
    @given()
    def any_more(completion, *args, **kwargs):
        return float(args == ())

    assert step(spec_of(any_more))[1][1] == 1.0


UNDECORATED = """
import functools

class Exact:
    def __init__(self, value):
        self.value = value

    def __call__(self, completion, answer):
        return self.value * (completion == str(answer))

    def score(self, completion, answer):
        return self(completion, answer)

    @staticmethod
    def twice(completion, answer):
        return 2.0 * (completion == str(answer))

def plain(completion, answer, value=2.0):
    return value * (completion == str(answer))

def make(model_name):
    return 1.0

instance = Exact(2.0)
method = instance.score
partial = functools.partial(plain, value=2.0)
"""


@pytest.mark.parametrize("name", ["instance", "method", "partial", "plain", "Exact.twice", "instance.score"])
@pytest.mark.parametrize("processes", [0, 1])
def test_undecorated_by_its_path(write, name, processes):
    path = write(UNDECORATED, "undecorated.py")
    rows = write("\n".join(json.dumps({"prompt": f"p{n}", "answer": "42"}) for n in range(9)), "rows.jsonl")
    spec = registry.spec(f"{path}:{name}", data={"path": str(rows)}, processes=processes)
    assert step(spec, text="42")[1][1] == 2.0
    assert registry.spec_from_json(spec.to_json()) == spec
    assert spec.fingerprint()["code"]
    if name != "plain" and not processes:
        with pytest.raises(ConfigError, match=r"undecorated.py:make is not usable as environment"):
            registry.spec(f"{path}:make")


def test_undecorated_by_its_import_path_and_in_python(write, monkeypatch):
    package = write("", "rewards_of_mine/__init__.py").parent
    write("from .inner import instance as exact, plain\n", "rewards_of_mine/__init__.py")
    write(UNDECORATED, "rewards_of_mine/inner.py")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("plain", "exact", "exact.score"):
        spec = registry.spec(f"rewards_of_mine:{name}", data={"path": "rows.jsonl"})
        assert spec.function("42", answer=42) == 2.0
        assert registry.spec_from_json(spec.to_json()) == spec
    module = sys.modules["rewards_of_mine.inner"]
    for value in (module.plain, module.instance, module.partial):
        assert registry.spec(value, data={"path": "rows.jsonl"}).function("42", answer=42) == 2.0
    assert target_of(module.partial) == "rewards_of_mine.inner:partial"
    envgym.register("me/Exact", module.instance)
    assert registry.spec("me/Exact").function("42", answer=42) == 2.0


def test_a_list_of_functions_holds_one_at_least():
    with pytest.raises(ConfigError, match="empty list of functions"):
        envgym.reward([])


def test_tasks_given_by_a_function_of_the_split():
    @envgym.reward(tasks=lambda split: ({"question": f"{split} {index}"} for index in range(3)))
    def brevity(completion):
        return 1.0

    assert [task.prompt for task in all_tasks(spec_of(brevity), "test")] == ["test 0", "test 1", "test 2"]


def test_tasks_from_data_need_no_answers(write):
    data = write("\n".join(json.dumps({"prompt": f"p{index}"}) for index in range(30)), "rows.jsonl")

    @envgym.reward
    def brevity(completion):
        return 1.0

    spec = spec_of(brevity, data={"path": str(data)})
    assert len(all_tasks(spec, "train")) + len(all_tasks(spec, "test")) == 30
    with pytest.raises(ConfigError, match=r"mine needs tasks: data.path=FILE, or tasks=… in its decorator"):
        all_tasks(spec_of(brevity), "train")


def test_the_answer_is_what_a_replay_shows():
    @given()
    def brevity(completion):
        return 1.0

    spec = spec_of(brevity)
    assert spec.demonstrations(TASK, seed=0) == ["42"]
    with pytest.raises(ConfigError, match="no demonstrations"):
        spec.demonstrations(Task("t", prompt="p"), seed=0)


def test_prompts_as_raw_text():
    @given()
    def brevity(completion):
        return 1.0

    assert step(spec_of(brevity, chat=False))[0] == Observation(text="What is 40 + 2?")


# -- names ---------------------------------------------------------------------------------------------------

BREVITY = '''
import envgym

ROWS = [{"prompt": f"say {n}"} for n in range(20)]

@envgym.reward(tasks=ROWS)
def brevity(completion):
    """Short is good."""
    return 1.0 / (1 + len(completion.split()))
'''


def test_a_file_with_one_function_is_an_environment(write):
    path = write(BREVITY)
    for name in (str(path), f"{path}:brevity"):
        spec = registry.spec(name, chat=False)
        assert step(spec, text="a b c")[1][1] == 0.25
        assert registry.spec_from_json(spec.to_json()) == spec == pickle.loads(pickle.dumps(spec))
        assert spec.fingerprint()["code"]
    assert type(registry.spec(str(path))).__doc__ == "Short is good."
    module = sys.modules[registry.spec(str(path)).function.__module__]
    assert module.brevity("one two three") == 0.25, "it is still the function it was"


def test_registered_it_is_made_by_its_name(write):
    @given()
    def brevity(completion):
        return 1.0

    envgym.register("me/Brevity-v0", brevity, chat=False)
    assert envgym.make("me/Brevity").spec == registry.spec("me/Brevity-v0")
    assert registry.spec_from_json(registry.spec("me/Brevity").to_json()) == registry.spec("me/Brevity")
    assert registry.spec("me/Brevity").config.chat is False
    with pytest.raises(ConfigError, match=r"it must be a subclass .* \(or decorate it with @envgym.reward\)"):
        envgym.register("me/Plain", lambda completion: 1.0)


def test_several_in_a_file_are_told_apart(write):
    path = write(BREVITY + "\n@envgym.reward\ndef other(completion): return 1.0\n")
    with pytest.raises(NameNotFound, match=r"choose .*brevity.py:brevity or .*brevity.py:other"):
        registry.spec(str(path))
    with pytest.raises(NameNotFound, match=r"no function decorated with @envgym.reward"):
        registry.spec(str(write("def plain(completion): return 1.0", "plain.py")))


def test_decorating_needs_no_heavy_import():
    code = (
        "import sys, envgym\n@envgym.reward\ndef f(completion): return 1\nprint({'torch', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# -- rolled out ----------------------------------------------------------------------------------------------


def outcomes(groups):
    return [(episode.outcome.reason, episode.reward, episode.score) for group in groups for episode in group.episodes]


def test_rewards_and_scores_reach_the_episodes(play):
    @given()
    def brevity(completion, answer):
        return {"reward": -len(completion.split()), "score": 0.5, "metrics": {"words": len(completion.split())}}

    [group] = play(spec_of(brevity))
    assert outcomes([group]) == [("", 0.0, 0.5), ("", -1.0, 0.5), ("", -2.0, 0.5)]
    assert [episode.metrics for episode in group.episodes] == [{"words": float(n)} for n in range(3)]


def test_a_function_that_raises_or_hangs_fails_its_episode_alone(play):
    @given()
    def breaks(completion):
        if completion == "word":
            raise KeyError("gold")
        if completion == "word word":
            time.sleep(3)
        return 1.0

    [group] = play(spec_of(breaks, call_timeout=0.5))
    assert outcomes([group]) == [("", 1.0, 1.0), ("environment", None, None), ("timeout", None, None)]
    assert group.episodes[1].outcome.message.startswith(f"KeyError: 'gold' ({__file__}, line ")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batch_function_is_called_once_for_a_group(play, asynchronous):
    calls = []

    def many(completion, answer, hint, task, action):
        calls.append((completion, answer, hint, [one.id for one in task], [a.stop_reason.value for a in action]))
        longest = max(map(len, completion))
        return [float(len(text) == longest) for text in completion]

    async def many_async(completion, answer, hint, task, action):
        return many(completion, answer, hint, task, action)

    rows = [{"prompt": "p", "answer": "a", "hint": "h"}] * 2
    decorated = envgym.reward(batch=True, tasks=rows)(many_async if asynchronous else many)
    groups = play(spec_of(decorated), [TASK, Task("u", prompt="?", answer="1", fields={"hint": ""})])
    assert outcomes(groups) == [("", 0.0, 0.0), ("", 0.0, 0.0), ("", 1.0, 1.0)] * 2
    assert sorted(calls)[1] == (["", "word", "word word"], ["42"] * 3, ["add"] * 3, ["t"] * 3, ["stop"] * 3)
    assert len(calls) == 2


INVALID = ("invalid_environment", None, None)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, None, envgym.Reward(3.0, score=0.5)], [("", 1.0, 1.0), ("", None, None), ("", 3.0, 0.5)]),
        ({"reward": (1, 2, 3), "score": [0, 0.5, 1]}, [("", 1.0, 0.0), ("", 2.0, 0.5), ("", 3.0, 1.0)]),
        ([{"score": 1}, {"overall": 0.5}, (1.0, False)], [("", 1.0, 1.0), ("", 0.5, 0.5), ("", 1.0, 1.0)]),
        ({"score": [1, 0.5, 0], "pred": ["a", "b", "c"]}, [("", 1.0, 1.0), ("", 0.5, 0.5), ("", 0.0, 0.0)]),
        (([1, 0.5, 0], {"acc": [1, 0, 0], "mean": 0.5}), [("", 1.0, 1.0), ("", 0.5, 0.5), ("", 0.0, 0.0)]),
        (([1, 0.5, 0], ["a", None, "b"]), [("", 1.0, 1.0), ("", 0.5, 0.5), ("", 0.0, 0.0)]),
        (([1, 0.5], {"acc": [1, 0]}), [INVALID] * 3),
        ([1, float("nan"), "x"], [("", 1.0, 1.0), INVALID, INVALID]),
        ([1.0], [INVALID] * 3),
        (1.0, [INVALID] * 3),
    ],
)  # fmt: skip
def test_what_a_batch_function_returns(play, returned, expected):
    @given(batch=True)
    def many(completion):
        return returned

    assert outcomes(play(spec_of(many))) == expected


def test_a_batch_functions_metrics_exception_and_deadline(play):
    @given(batch=True)
    def many(completion, answer):
        if answer[0] == "raise":
            raise ValueError("no")
        if answer[0] == "hang":
            time.sleep(3)
        return {"reward": [1.0] * 3, "metrics": {"words": [len(text.split()) for text in completion]}}

    tasks = [Task(answer, prompt="p", answer=answer) for answer in ("fine", "raise", "hang")]
    fine, raises, hangs = play(spec_of(many, call_timeout=0.5), tasks)
    assert [episode.metrics["words"] for episode in fine.episodes] == [0.0, 1.0, 2.0]
    line = many.__code__.co_firstlineno + 3
    assert {(e.outcome.status, e.outcome.reason, e.outcome.message) for e in raises.episodes} == {
        (Status.FAILED, "environment", f"ValueError: no ({__file__}, line {line})")
    }
    assert {e.outcome.reason for e in hangs.episodes} == {"timeout"}


def test_a_batch_function_in_a_process_draws_the_same_again(play, write):
    spec = registry.spec(f"{write(PROCESSES)}:many", processes=1)
    first, second = play(spec), play(registry.spec_from_json(spec.to_json()))
    assert outcomes(first) == outcomes(second)
    assert len(set(outcomes(first))) == 3
    assert first[0].episodes[0].metrics["pid"] != second[0].episodes[0].metrics["pid"]


def test_an_episode_that_a_limit_ended_before_its_first_turn_has_an_empty_completion():
    """In a group that is judged as a whole, it must not fail the others."""
    episode = Episode("e", Task("t"), Outcome.truncate("time"), [])
    assert last_action(episode) == Action("", (), stop_reason=StopReason.LENGTH)
