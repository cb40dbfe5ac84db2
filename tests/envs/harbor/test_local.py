"""Harbor's tasks in the local place: their rewards are Harbor's, and a policy can neither forge nor read them."""

import pytest

ORACLE, NOBODY = {"settings": {"program": "oracle"}}, {"settings": {"program": "nop"}}
SECRET = "a secret of this machine"
SLOW = "sleep 1.5\n[ -e /app/answer.txt ] && score=1 || score=0\necho $score > /logs/verifier/reward.txt\n"


def rewards(answer):
    assert [result["failure"] for result in answer["results"]] == [None] * len(answer["results"])
    return [result["reward"] for result in answer["results"]]


def test_the_oracle_earns_all_and_an_idle_agent_nothing(play, make_task, policy):
    url = policy.add("cd /app; pwd; id -u; echo ready > answer.txt", "cat answer.txt; exit 3")
    answer = play(make_task(), [ORACLE, NOBODY, {"url": url}])
    assert rewards(answer) == [1, 0, 1]
    assert policy.answers(url) == ["/app\n0", "ready\n\n[exit status 3]"]
    assert [row["id"] for row in answer["loaded"]["rows"]] == ["ready"]


STEPS = """
[[steps]]
name = "one"
min_reward = 1.0
[[steps]]
name = "two"
"""


def make_steps(make_task, strategy="mean"):
    """A task of two steps: the first wants a file, the second, worth a half in any case, another."""
    test = "[ -e /app/{0}.txt ] && score=1 || score={1}\necho $score > /logs/verifier/reward.txt\n"
    files = {}
    for name, least in (("one", 0), ("two", 0.5)):
        files |= {
            f"steps/{name}/instruction.md": f"Write {name}.txt.\n",
            f"steps/{name}/tests/test.sh": "#!/bin/bash\n" + test.format(name, least),
            f"steps/{name}/solution/solve.sh": f"#!/bin/bash\nls /solution\necho > /app/{name}.txt\n",
        }
    files["steps/two/workdir/given.txt"] = "given\n"
    return make_task("steps", toml=f'multi_step_reward_strategy = "{strategy}"\n{STEPS}', files=files)


def test_steps_are_played_in_order_until_one_earns_too_little(play, make_task, policy):
    look = "ls /app /tests /logs/verifier 2>&1"
    task = make_steps(make_task)
    calls = [ORACLE, NOBODY, {"url": policy.add("touch /app/one.txt")}, {"url": (url := policy.add(look))}]
    answer = play(task, calls)
    assert rewards(answer) == [1, 0, 0.75, 0]
    assert answer["results"][1]["metrics"] == {"one/reward": 0}  # the second was not played
    assert answer["results"][2]["metrics"] == {"one/reward": 1, "two/reward": 0.5}
    assert "/tests': No such file" in policy.answers(url)[0]
    assert answer["loaded"]["rows"][0]["prompt"] == "Write one.txt.\n\n\nWrite two.txt.\n"
    last = play(make_steps(make_task, "final"), [{"url": policy.add("touch /app/one.txt")}])
    assert rewards(last) == [0.5]


FORGE = 'mkdir -p /logs/verifier /tests; echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; '
FORGE += "cp /bin/true /tests/test.sh; echo 1 > /logs/verifier/reward.txt"
ATTACKS = {
    "a forged file": [FORGE],
    "a daemon that writes it": [f"setsid nohup bash -c 'while true; do {FORGE}; sleep 0.02; done' >/dev/null 2>&1 &"],
    "links to its folder": [
        "ln -s /logs/verifier /app/verifier; ln -s /logs/verifier /logs/agent/verifier; rm -rf /logs/artifacts/*",
        "ln -s /logs/verifier/reward.json /logs/artifacts/reward.json; ln -s ../verifier /logs/agent/link",
        "echo 1 > /app/verifier/reward.txt; mv /logs/agent /logs/verifier; ln -s /logs/agent /logs/verifier",
    ],
    "a mount, a namespace": ["mount -t tmpfs none /logs", "unshare -Urm mount -t tmpfs none /logs", FORGE],
    "the process of the box": ["kill -9 1; kill -9 -1", FORGE],
}


@pytest.mark.parametrize("commands", ATTACKS.values(), ids=ATTACKS)
def test_a_policy_that_forges_the_reward_earns_nothing(play, make_task, policy, commands):
    answer = play(make_task(test=SLOW), [{"url": policy.add(*commands)}])
    assert rewards(answer) == [0]


def test_the_daemon_would_forge_it_if_it_lived(play, make_task, policy):
    """The same daemon as above, left by the tests themselves: it has the time and the right to write."""
    daemon = ATTACKS["a daemon that writes it"][0]
    task = make_task(test=f"{daemon}\n{SLOW}")
    answers = (play(task, [NOBODY]) for _ in range(10))
    assert rewards(next(answer for answer in answers if "Empty" not in str(answer["results"]))) == [1]  # not in a write


def test_a_policy_reads_neither_the_tests_nor_this_machine(play, make_task, policy, tmp_path):
    (tmp_path / "secret.txt").write_text(SECRET)
    folder = tmp_path.parts[1]
    url = policy.add(
        f"cat {tmp_path}/secret.txt /tests/test.sh /solution/solve.sh /etc/shadow; ls /{folder} /root /home /proc/1/fd",
        f"ln -s {tmp_path}/secret.txt /app/link; ln -s {tmp_path}/secret.txt /logs/artifacts/link.txt",
        f"ln -s {tmp_path} /logs/agent/folder; ln /etc/passwd /logs/artifacts/hard; ln -s / /logs/artifacts/root",
        "find / -name '*.sh' -newer /etc/passwd; ps -eo args; env; cat /proc/1/environ",
        "curl -s -m 2 http://127.0.0.1:1 ; cat /proc/net/dev",
        "mkfifo /logs/artifacts/fifo; mknod /logs/artifacts/disk b 254 0",
    )
    toml = f'artifacts = ["/app/link", "{tmp_path}/secret.txt"]\n'
    assert rewards(play(make_task(toml=toml), [{"url": url}])) == [0]
    said = "\n".join(policy.answers(url))
    assert SECRET not in said
    assert "solve.sh" not in said.replace("/solution/solve.sh': No such file", "").replace("/solution/solve.sh: No", "")
    assert "eth" not in said
    assert "OMP_NUM" not in said
    copies = [
        path for path in (tmp_path / "temporary").rglob("*") if path.is_file() and SECRET in path.read_text("latin1")
    ]
    assert copies == []
    links = [path for path in (tmp_path / "temporary").rglob("*") if path.is_symlink()]
    assert links == []
