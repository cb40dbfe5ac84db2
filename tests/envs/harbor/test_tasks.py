"""Tasks of Harbor: their images, limits, rewards and failures."""

import os
import shutil
from pathlib import Path

import pytest

ORACLE, NOBODY = {"settings": {"program": "oracle"}}, {"settings": {"program": "nop"}}


def only(answer):
    [result] = answer["results"]
    return result


FAILURES = {
    "no file": ("true\n", "verifier", "No reward file found"),
    "an empty file": ("touch /logs/verifier/reward.json\n", "verifier", "Reward file is empty"),
    "not a number": ("echo nan > /logs/verifier/reward.txt\n", "verifier", "Non-finite reward nan"),
    "no number in JSON": ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json\n', "verifier", "Non-numeric reward"),
    "time": ("echo 1 > /logs/verifier/reward.txt; sleep 60\n", "verifier", "timed out after 1"),
    "another name": (
        "echo '{\"speed\": 1}' > /logs/verifier/reward.json\n",
        "no_reward",
        "(rewards: speed); set env.reward",
    ),
    "a folder": ("mkdir /logs/verifier/reward.json\n", "agent", "IsADirectoryError"),
}


@pytest.mark.parametrize(("test", "kind", "message"), FAILURES.values(), ids=FAILURES)
def test_a_verifier_without_a_reward_is_a_failure(play, make_task, test, kind, message):
    limit = "[verifier]\ntimeout_sec = 1.0\n" if "sleep" in test else ""
    result = only(play(make_task(test=test, toml=limit), [ORACLE]))
    assert result["reward"] is None
    assert result["failure"]["kind"] == kind
    assert message in result["failure"]["message"]


def test_a_step_without_a_reward_is_a_failure_though_another_has_one(play, make_task):
    files = {"steps/a/instruction.md": "a", "steps/b/instruction.md": "b", "steps/b/tests/test.sh": "#!/bin/bash\n"}
    files["steps/a/tests/test.sh"] = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    task = make_task(toml='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n', files=files)
    assert only(play(task, [NOBODY]))["failure"]["kind"] == "verifier"


def test_several_rewards_have_names(play, make_task):
    test = 'echo \'{"reward": 0.5, "speed": 2}\' > /logs/verifier/reward.json\n'
    result = only(play(make_task(test=test), [NOBODY]))
    assert (result["reward"], result["rewards"]) == (0.5, {"reward": 0.5, "speed": 2})
    assert only(play(make_task(test=test), [NOBODY], reward="speed"))["reward"] == 2


def test_an_agent_out_of_time_is_graded_and_truncated(play, make_task, policy):
    task = make_task(toml="[agent]\ntimeout_sec = 3.0\n")
    url = policy.add("echo ready > /app/answer.txt; sleep 60")
    result = only(play(task, [{"url": url}]))
    assert (result["reward"], result["truncated"], result["failure"]) == (1, True, None)


def test_an_unreachable_policy_is_a_failure(play, make_task):
    answer = play(make_task(), [{}, {"settings": {"program": "terminus-2"}}])
    kinds = [
        (result["reward"], result["failure"]["kind"], result["failure"]["retryable"]) for result in answer["results"]
    ]
    assert kinds == [(None, "policy_unreachable", True)] * 2


def test_a_command_has_limits(play, make_task, policy):
    url = policy.add("yes | head -c 3000000; echo end >&2", "sleep 60 & echo left", "cd; pwd; exec 2>&1; nosuchprogram")
    only(play(make_task(), [{"url": url}]))
    long, left, missing = policy.answers(url)
    assert len(long) < 1_100_000
    assert long.endswith("\n[1951424 more bytes]end")
    assert left == "left"  # at once, though a process still holds its output
    assert missing == "/root\nbash: line 1: nosuchprogram: command not found\n\n[exit status 127]"


IMAGE = r"""# a plain system
FROM python:3-slim
ENV PORT=80 \
    NAME="a b"
ENV PATH="/work/bin:$PATH"
WORKDIR /work
RUN mkdir -p data/deep && apt-get update && apt-get install -y --no-install-recommends tar bash \
    && rm -rf /var/lib/apt/lists/*
COPY one.txt two.txt ./
COPY folder /work/folder/
COPY one.txt /srv/renamed.txt
COPY link.txt /srv/
CMD ["bash"]
"""


def test_a_plain_image(play, make_task, policy):
    files = {"environment/one.txt": "1", "environment/two.txt": "2", "environment/folder/three.txt": "3"}
    task = make_task(image=IMAGE, files=files, toml='[environment]\nenv = { COLOR = "red" }\n')
    (task / "environment" / "link.txt").symlink_to("one.txt")
    url = policy.add(
        "pwd; echo $PORT $NAME $COLOR $PATH; find . /srv -type f | sort | xargs tail -n +1; ls -d data/deep"
    )
    assert only(play(task, [{"url": url}]))["failure"] is None
    pwd, variables, *rest = policy.answers(url)[0].splitlines()
    assert (pwd, variables.startswith("80 a b red /work/bin:/")) == ("/work", True)
    texts = "==> ./folder/three.txt <==|3|==> ./one.txt <==|1|==> ./two.txt <==|2|==> /srv/link.txt <==|1|"
    assert [line for line in rest if line] == f"{texts}==> /srv/renamed.txt <==|1data/deep".split("|")


REFUSED = {
    "FROM alpine:3": "the image alpine:3",
    "FROM python:3.2": "the image python:3.2",
    "FROM debian:12\nRUN make": "RUN make",
    "FROM debian:12\nRUN mkdir -p a && mkdir {b,c}": "RUN mkdir {b,c}",
    "FROM debian:12\nRUN mkdir -m 700 a": "RUN mkdir -m 700 a",
    "FROM debian:12\nRUN apt-get install -y no-such-package": "the package no-such-package, which this machine",
    "FROM debian:12\nRUN pip install no-such==1": "RUN pip install no-such==1",
    "FROM debian:12\nCOPY x /usr/bin/x": "files in /usr/bin/x",
    "FROM debian:12\nCOPY x /tests/x": "files in /tests/x",
    "FROM debian:12\nCOPY ../task.toml /app/": "COPY ../task.toml /app/",
    "FROM debian:12\nCOPY --from=x x /app/": "COPY --from=x x /app/",
    "FROM debian:12\nUSER someone": "USER someone",
    "FROM debian:12\nWORKDIR /": "files in /",
    "FROM debian:12\nENTRYPOINT x": "ENTRYPOINT x",
}


def test_other_images_are_refused_by_what_they_need(play, make_task):
    for image, needs in REFUSED.items():
        answer = play(make_task(image=image, files={"environment/x": "x"}))
        assert answer["mistake"].startswith(f"ready: it needs {needs}"), image
        assert answer["mistake"].endswith(": a container engine (env.place=docker or podman)")


@pytest.mark.parametrize(
    ("toml", "needs"),
    {
        '[environment]\nnetwork_mode = "public"\n': "a network (network_mode = 'public')",
        "[environment]\nallow_internet = true\n": "a network (network_mode = 'public')",
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a"]\n': "a network (network_mode = 'allowlist')",
        '[verifier]\nnetwork_mode = "public"\n': "a network (network_mode = 'public')",
        '[agent]\nuser = "someone"\n': "the user someone",
        "[environment]\ngpus = 1\n": "GPUs or TPUs",
    }.items(),
)
def test_tasks_that_need_more_are_refused(play, make_task, toml, needs):
    answer = play(make_task(toml=toml))
    assert answer["mistake"] == f"ready: it needs {needs}: a container engine (env.place=docker or podman)"


def test_a_task_that_asks_for_the_internet_may_run_without_it(play, make_task):
    task = make_task(toml='[environment]\nallow_internet = true\n[agent]\nnetwork_mode = "public"\n')
    assert only(play(task, [ORACLE], offline=True))["reward"] == 1
    hosts = make_task("hosts", toml='[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a"]\n')
    assert "a network (network_mode = 'allowlist')" in play(hosts, offline=True)["mistake"]


def test_their_task_with_every_feature_of_steps(play):
    """`ENVGYM_HARBOR_TASKS` is a folder with `multi-step`: the recipes of harbor-framework/harbor-cookbook."""
    folder = os.environ.get("ENVGYM_HARBOR_TASKS")
    if folder is None:
        pytest.skip("ENVGYM_HARBOR_TASKS names no folder with Harbor's task multi-step")
    oracle, nobody = play(Path(folder) / "multi-step", [ORACLE, NOBODY], offline=True)["results"]
    assert (oracle["reward"], nobody["reward"]) == (1, 0)
    assert oracle["metrics"] == {"scaffold/reward": 1, "implement/reward": 1, "document/reward": 1}
    assert nobody["metrics"] == {"scaffold/reward": 0}


def test_mistakes_are_said_in_a_line(play, make_task, tmp_path):
    assert "is no task of Harbor" in play(tmp_path / "nowhere")["mistake"]
    assert "Harbor has no place 'mars': set env.place to local, ack," in play(make_task(), place="mars")["mistake"]
    (tmp_path / "tasks" / "ready" / "task.toml").write_text("[[", encoding="utf-8")
    assert play(tmp_path / "tasks")["mistake"].startswith("ready: ")


def test_a_suite_has_a_row_for_each_task_and_says_where_its_reward_can_be_forged(play, make_task):
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    make_task("shared")
    path = make_task("separate", toml=f'artifacts = ["/app/answer.txt"]\n{separate}').parent
    answer = play(path, [{"row": 0, **ORACLE}, {"row": 0, **NOBODY}])
    assert [(row["id"], bool(row["forgery"])) for row in answer["loaded"]["rows"]] == [
        ("separate", False),
        ("shared", True),
    ]
    assert [result["reward"] for result in answer["results"]] == [1, 0]
    elsewhere = play(path, place="docker")
    assert "reward.json" in elsewhere["loaded"]["rows"][1]["forgery"]


def test_a_separate_verifier_may_have_an_image_with_its_tests(play, make_task):
    toml = 'artifacts = ["/app/answer.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    test = "[ -e /tests/more.txt -a -e /app/answer.txt ] && score=1 || score=0\n"
    test += "echo $score > /logs/verifier/reward.txt\n"
    files = {"tests/Dockerfile": "FROM debian:12\nCOPY . /tests/\n", "tests/more.txt": ""}
    task = make_task(toml=toml, test=test, files=files)
    assert [(result["reward"], result["failure"]) for result in play(task, [ORACLE, NOBODY])["results"]] == [
        (1, None),
        (0, None),
    ]


@pytest.mark.skipif(not shutil.which("tmux", path="/usr/local/bin:/usr/bin:/bin"), reason="tmux is not installed")
def test_terminus_2_plays_in_the_local_place(play, make_task, policy):
    keys = '{"analysis": "", "plan": "", "commands": [{"keystrokes": "echo ready > answer.txt\\n", "duration": 1}]%s}'
    url = policy.add(keys % "", keys % ', "task_complete": true', keys % ', "task_complete": true')
    result = only(play(make_task(), [{"settings": {"program": "terminus-2"}, "url": url}]))
    assert (result["reward"], result["failure"]) == (1, None)
    assert "# echo ready > answer.txt" in policy.answers(url)[0]
