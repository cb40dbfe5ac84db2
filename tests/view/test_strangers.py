"""Run folders that a stranger made: what is wrong with one is told of it, and the others are shown."""

import base64
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from envgym.cli import main
from envgym.episodes.files import write_episodes
from envgym.errors import MAX_LINE, ConfigError, DataError
from envgym.monitoring.alarms import Alarms
from envgym.view import reading, sources
from envgym.view.server import Answers, to_json
from envgym.yaml_files import MAX_NODES, read_yaml

sys.path.insert(0, str(Path(__file__).parent))
from conftest import made, make_run, viewing

DEEP = "[" * 200_000 + "]" * 200_000
LIMIT = 4 * 2**30
"""Address space of the child that looks at them: what they would unpack to is more."""
QUESTIONS = ["run|{}", "metrics|{}|0", "list|{}|1|0|99", "list|{}|0|0|99", "episode|{}|1|0", "episode|{}|0|0",
             "lanes|{}|1", "search|{}|1|x", "misgraded|{}|1", "unstated|{}|1",
             "history|{}|1|0"]  # fmt: skip
CHILD = f"""
import json, pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
from envgym.errors import EnvgymError
from envgym.view.server import Answers, to_json
answers = Answers([pathlib.Path(path) for path in sys.argv[1:]])
told = {{}}
for line in answers("index"):
    told[line["id"]] = own = {{"state": line["state"], "why": line.get("why", "")}}
    for question in {QUESTIONS!r}:
        try:
            own[question] = len(to_json(answers(question.format(line["id"]))))
        except (EnvgymError, ValueError) as error:
            own[question] = str(error)
status = open("/proc/self/status").read()
print(json.dumps([told, int(status.split("VmHWM:")[1].split()[0]) / 1024]))
"""


def aliases(levels=10, width=10):
    """YAML of a few hundred bytes that stands for `width ** levels` values."""
    rows = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(rows) + "\n"


def swap(path, target):
    """A link in place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def rewrite(path, **columns):
    """Other columns in a Parquet file; each is made for its number of rows."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    for name, make in columns.items():
        table = table.set_column(table.column_names.index(name), name, make(len(table)))
    pq.write_table(table, path, compression="zstd")


def long_texts(rows):
    """A text of 128 MiB in every row, which the file holds once."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 2**27])


def texts(rows):
    import pyarrow as pa

    return pa.array(["high"] * rows)


def one_long_text(rows):
    import pyarrow as pa

    every = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), ["x" * 2**20])
    message = pa.StructArray.from_arrays([every, every], ["role", "content"])
    return pa.ListArray.from_arrays([0, *[3000] * rows], message)


def many_values(rows):
    """300 million values in the first row, a few kilobytes of the file."""
    import pyarrow as pa

    bits = pa.Array.from_buffers(pa.bool_(), 300_000_000, [None, pa.py_buffer(bytes(37_500_000))])
    return pa.ListArray.from_arrays([0, *[300_000_000] * rows], bits)


def record(run, **changes):
    """The run's first episode alone, as a line of JSON with other values, in place of a run."""
    shutil.rmtree(run)
    run.mkdir()
    write_episodes(run / "episodes.jsonl", [made(0, 0)])
    told = json.loads((run / "episodes.jsonl").read_text())
    (run / "episodes.jsonl").write_text(json.dumps({**told, **changes}) + "\n")


def many_versions(run):
    record(run)
    told = json.loads((run / "episodes.jsonl").read_text())
    told["rows"][0]["segments"][1]["versions"] = [{"version": 1, "start": -5, "end": 10**12}]
    (run / "episodes.jsonl").write_text(json.dumps(told) + "\n")


GROWING = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "model": {"type": "WordLevel", "vocab": {"a" * (n + 1): n for n in range(99)}, "unk_token": "a"},
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(33)
    ]},
}  # fmt: skip
"""A tokenizer of 9 KB whose tokens are texts of 8 GiB."""
STEP, EVENTS = "rollouts/step_000001.parquet", "events/step_000001.jsonl"
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 10}]}}\n" for n in range(1, 9))
METRICS = ['{"a":1}', "[1]", DEEP, '"x"', '{"step":"x"}', '{"step":4,"alarms":5,"loss":"x","grad_norm":{}}',
           '{"step":5,"alarms":["mismatch",{},["x"]],"eval/ci95":[[[]]]}', '{"step":6,"alarms":["mismatch","none",""]}',
           "\x00" * 2**21]  # fmt: skip
READABLE = {
    "steps without a number": lambda run: [
        (run / "rollouts" / f"step_{n}.parquet").touch() for n in ("abc", "\u0661", "-1")
    ],
    "metrics that are none": lambda run: (run / "metrics.jsonl").open("a").write("\n".join(METRICS) + "\n"),
    "a summary that is none": lambda run: (run / "summary.json").write_text("[1]"),
    "a deep summary": lambda run: (run / "summary.json").write_text(DEEP),
    "a lock that waits": lambda run: pipe(run / "lock"),
    "a lock without an end": lambda run: swap(run / "lock", "/dev/zero"),
    "events that are none": lambda run: (run / "events" / "step_000001.jsonl").write_text(
        f'[1]\n{DEEP}\n{{"phases":1}}\n'
    ),
    "a tokenizer that is none": lambda run: (run / "tokenizer.json").write_text('{"model": 1}'),
    "an episode of versions": many_versions,
    "a tokenizer that grows": lambda run: (run / "tokenizer.json").write_text(json.dumps(GROWING)),
}
"""Runs that are shown in spite of something: whatever is wrong is left out."""
REFUSED = {
    "config of aliases": ("run", "counting what its aliases", lambda run: (run / "config.yaml").write_text(aliases())),
    "config of merges": ("run", "counting what its aliases", lambda run: (run / "config.yaml").write_text(MERGED)),
    "config in itself": ("run", "counting what its", lambda run: (run / "config.yaml").write_text("a: &a [*a]\n")),
    "config too deep": ("run", "too deep", lambda run: (run / "config.yaml").write_text(f"a: {DEEP}")),
    "config too large": ("run", "larger than", lambda run: os.truncate(run / "config.yaml", 2**32)),
    "config without an end": ("run", "leads to /dev/zero", lambda run: swap(run / "config.yaml", "/dev/zero")),
    "config that waits": ("run", "is not a file", lambda run: pipe(run / "config.yaml")),
    "a step that is elsewhere": ("list", "leads to /etc/passwd", lambda run: swap(run / STEP, "/etc/passwd")),
    "a step that waits": ("list", "is not a file", lambda run: pipe(run / STEP)),
    "a step that is none": ("list", "not a file of episodes", lambda run: (run / STEP).write_bytes(b"PAR1" * 99)),
    "a step of other kinds": ("list", "has another type", lambda run: rewrite(run / STEP, reward=texts)),
    "long messages": ("episode", "larger than 64 MiB", lambda run: rewrite(run / STEP, messages=one_long_text)),
    "much learned": ("episode", "more than 64 MiB of an episode", lambda run: rewrite(
        run / "learned" / "step_000001.parquet", advantages=one_long_text)),
    "events that wait": ("lanes", "is not a file", lambda run: pipe(run / "events" / "step_000001.jsonl")),
    "events without an end": ("lanes", "larger than 32 MiB", lambda run: os.truncate(
        run / "events" / "step_000001.jsonl", 2**40)),
    "an episode without an end": ("list", "this is not an episode", lambda run: record(run, reward=[[]] * 9)),
    "a deep episode": ("list", "this is not an episode", lambda run: (
        record(run), (run / "episodes.jsonl").write_text(f"{DEEP}\n"))),
}  # fmt: skip
"""Runs of which something is refused: the first question about it, and what it is answered."""
LARGE = {
    "long keys": ("list", "lists of more than 512 MiB", lambda run: rewrite(run / STEP, key=long_texts)),
    "many values": ("episode", "unpacks to more than 1024 MiB", lambda run: rewrite(run / STEP, rows=many_values)),
}
"""The same; it takes seconds to make them."""
UNREADABLE = {
    "metrics without an end": ("leads to /dev/zero", lambda run: swap(run / "metrics.jsonl", "/dev/zero")),
    "metrics that wait": ("is not a file", lambda run: pipe(run / "metrics.jsonl")),
    "metrics too large": ("larger than 256 MiB", lambda run: os.truncate(run / "metrics.jsonl", 2**40)),
    "a summary without an end": ("leads to /dev/zero", lambda run: swap(run / "summary.json", "/dev/zero")),
    "a summary that waits": ("is not a file", lambda run: pipe(run / "summary.json")),
    "a summary of another": ("AttributeError", lambda run: (run / "summary.json").write_text('{"eval": [1]}')),
    "steps that are elsewhere": ("leads to /etc", lambda run: (
        shutil.rmtree(run / "rollouts"), (run / "rollouts").symlink_to("/etc"))),
    "a name | of others": ("its name contains", lambda run: None),
}  # fmt: skip
"""Runs that the list of all calls unreadable, and why."""
EVERY = {**READABLE, **{name: one[-1] for name, one in (REFUSED | UNREADABLE).items()}}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A folder `runs` with a run of each kind, and one that is as it should be."""
    folder = tmp_path_factory.mktemp("zoo")
    make_zoo(folder, EVERY)
    return folder


def make_zoo(folder, kinds):
    make_run(folder / "runs" / "first", steps=1)
    for name, spoil in kinds.items():
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
        spoil(folder / "runs" / name)


def look(folder):
    """The answers to every question about each run, by its name, and the MiB that they took, of a process that may have
    no more than `LIMIT`."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, "runs"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    answers, peak = json.loads(child.stdout)
    return {name.removeprefix("runs/"): one for name, one in answers.items()}, peak


def is_refused(told, name, what, why):
    answered = [told[name][question] for question in QUESTIONS if question.startswith(what)]
    assert any(why in str(answer) for answer in answered), answered


@pytest.fixture(scope="module")
def told(zoo):
    return look(zoo)


def test_memory_is_bounded_whatever_they_hold(told):
    every, peak = told
    assert every.keys() == EVERY.keys() | {"first"}
    assert peak < 1024


@pytest.mark.slow
def test_memory_is_bounded_whatever_they_unpack_to(tmp_path):
    make_zoo(tmp_path, {name: spoil for name, (_, _, spoil) in LARGE.items()})
    assert all((tmp_path / "runs" / name / STEP).stat().st_size < 4 * 2**20 for name in LARGE)
    told, peak = look(tmp_path)
    for name, (what, why, _) in LARGE.items():
        is_refused(told, name, what, why)
    assert peak < 1536


@pytest.mark.parametrize("name", ["first", *READABLE])
def test_what_is_wrong_with_a_run_is_left_out(told, name):
    own = told[0][name]
    assert own["state"] in ("unfinished", "completed")
    step = 0 if name == "an episode of versions" else 1
    for question in ("run|{}", "metrics|{}|0", f"list|{{}}|{step}|0|99", f"episode|{{}}|{step}|0", "lanes|{}|1"):
        assert isinstance(own[question], int), (question, own[question])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(told, name):
    what, why, _ = REFUSED[name]
    assert told[0][name]["state"] == "unfinished"
    is_refused(told[0], name, what, why)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_listed_as_such(told, name):
    own = told[0][name]
    assert own["state"] == "unreadable"
    assert UNREADABLE[name][0] in own["why"]


def test_metrics_that_are_none_are_left_out(zoo):
    answers = Answers([zoo / "runs" / "metrics that are none"])
    [name] = answers.sources
    records = answers(f"metrics|{name}|0")["records"]
    assert [one["step"] for one in records] == [1, 4, 5, 6]
    assert records[1] == {"step": 4, "alarms": 5}
    assert records[2] == {"step": 5}
    assert records[3] == {"step": 6, "alarms": ["mismatch", "none", ""]}
    assert answers(f"run|{name}")["alarms"] == []  # the number of that step is not known


def test_an_alarm_is_told_as_the_run_told_it():
    alarms, names = Alarms(), []
    for step in range(40):
        record = {
            "step": step,
            "mismatch/mean_abs": 0.2,
            "critic/grad_norm": 0.1 if step < 39 else 1e4,
            "grad_norm": 0.1,
        }
        raised = alarms.observe(record)
        assert [sources.metric_and_sentence(one.name, record)[1] for one in raised] == [one.text for one in raised]
        names += [one.name for one in raised]
    assert "mismatch" in names
    assert any(name.startswith("critic/") for name in names)


def test_a_link_that_leads_out_is_listed_and_not_followed(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / "runs" / "first", "runs/first")
    shutil.copytree(zoo / "runs" / "first", "elsewhere/secret")
    looked_at = []
    kind = sources._kind
    monkeypatch.setattr(sources, "_kind", lambda path: looked_at.append(path) or kind(path))
    targets = {"other": tmp_path / "elsewhere", "root": "/", "gone": "/nowhere", "up": "..", "loop": ".",
               "file.jsonl": "/etc/passwd", "twin": "first", "round": "round"}  # fmt: skip
    for name, target in targets.items():
        Path("runs", name).symlink_to(target)
    answers = Answers([Path("runs")])
    lines = {line["id"]: line for line in answers("index")}
    assert lines.keys() == {f"runs/{name}" for name in ("first", "twin", "other", "root", "gone", "up", "file.jsonl")}
    for name in ("other", "root", "gone", "up", "file.jsonl"):
        line = lines[f"runs/{name}"]
        assert line["state"] == "link"
        assert f"leads to {os.path.realpath(targets[name] if name != 'up' else tmp_path)}" in line["why"]
        with pytest.raises(DataError, match="it is not followed"):
            answers(f"run|runs/{name}")
    assert answers("run|runs/twin")["steps"] == [1]
    assert all(path.parent in (Path(), Path("runs")) for path in looked_at)
    named = Answers([Path("runs/other")])  # named by its user, it is where it leads
    assert list(named.sources) == ["runs/other/secret"]
    both = Answers([Path("runs"), Path("elsewhere")])  # a link from one into the other is within
    Path("runs", "across").symlink_to(tmp_path / "elsewhere" / "secret")
    assert both("run|runs/across")["steps"] == [1]


def test_folders_without_an_end_are_walked_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WALKED", 40)
    make_run(tmp_path / "runs" / "zlast", steps=1)
    for n in range(100):
        (tmp_path / "runs" / "broad" / f"d{n:03d}").mkdir(parents=True)
    deep = tmp_path / "runs" / "deep"
    for _ in range(300):
        deep = deep / "d"
    deep.mkdir(parents=True)
    lines = {line["id"]: line for line in Answers([tmp_path / "runs"])("index")}
    assert {Path(name).name: line["state"] for name, line in lines.items()} == {
        "broad": "unreadable",
        "zlast": "unfinished",
    }
    assert "more than 40 files and folders" in lines[f"{tmp_path}/runs/broad"]["why"]


def test_a_name_that_is_no_text_takes_no_other_from_the_list(zoo, tmp_path):
    shutil.copytree(zoo / "runs" / "first", tmp_path / "first")
    os.rename(os.fsencode(tmp_path / "first"), os.fsencode(tmp_path) + b"/bad\xff")
    shutil.copytree(zoo / "runs" / "first", tmp_path / "first")
    lines = json.loads(to_json(Answers([tmp_path])("index")))
    assert {line["id"].rpartition("/")[2]: line["state"] for line in lines} == {
        "first": "unfinished",
        "bad?": "unreadable",
    }


def test_a_stage_reads_no_settings_beside_the_run_that_was_named(zoo, tmp_path):
    shutil.copytree(zoo / "runs" / "first", tmp_path / "first")
    (tmp_path / "first" / "config.yaml").unlink()
    (tmp_path / "config.yaml").write_text("seed: 99\n")
    assert Answers([tmp_path / "first"])(f"run|{tmp_path / 'first'}")["settings"] == {}


def test_only_the_runs_own_tokenizer_is_read(zoo, tmp_path, tiny_model):
    run = tmp_path / "first"
    shutil.copytree(zoo / "runs" / "first", run)
    (run / "config.yaml").write_text(f"stages:\n- {{model: {tiny_model}}}\n")
    question = f"episode|{run}|1|0"
    assert Answers([run])(question)["rows"][0]["texts"] is None
    swap(run / "tokenizer.json", tiny_model / "tokenizer.json")
    with pytest.raises(DataError, match="it is not followed"):
        Answers([run])(question)
    (run / "tokenizer.json").unlink()
    shutil.copy(tiny_model / "tokenizer.json", run)
    assert all(isinstance(text, str) for text in Answers([run])(question)["rows"][0]["texts"])
    os.renames(run / "tokenizer.json", run / "model" / "tokenizer.json")  # where earlier runs have it
    assert all(isinstance(text, str) for text in Answers([run])(question)["rows"][0]["texts"])


def test_an_export_leaves_out_what_cannot_be_read_and_says_why(zoo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    assert main(["export", "runs", "--episodes", "9999", "--out", str(tmp_path / "out.html")]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "; unreadable parts in runs/a deep episode, runs/a name | of others, " in said
    assert len(said) <= MAX_LINE + 1  # however many they are
    packed = re.search(r"id='held'>([^<]*)", (tmp_path / "out.html").read_text())[1]
    held = json.loads(gzip.decompress(base64.b64decode(packed)))
    lines = {line["id"].removeprefix("runs/"): line for line in held["index"]}
    assert lines.keys() == EVERY.keys() | {"first"}
    for name, (what, why, _) in REFUSED.items():
        if what == "run":
            assert lines[name]["state"] == "unreadable"
            assert why in lines[name]["why"]
            assert f"run|runs/{name}" not in held
        else:  # the place of what was refused says why
            told = [answer.get("error", "") for path, answer in held.items() if path.startswith(f"{what}|runs/{name}|")]
            assert any(why in error for error in told), name
    for name in UNREADABLE:
        assert lines[name]["state"] == "unreadable"
    for name in ("first", *(name for name in READABLE if name != "an episode of versions")):
        assert held[f"list|runs/{name}|1|0|2000"]["total"] == 16
        assert f"episode|runs/{name}|1|0" in held


def test_large_files_of_episodes_are_within_the_bounds():
    """What the bounds are said to hold: more than the largest of real runs."""
    assert reading.ROW >= 1_000_000 * (4 + 8 + 4 + 4)
    assert reading.GROUP >= 256 * 100_000 * 4 * 8
    assert reading.LISTED >= 700_000 * 700
    assert MAX_NODES >= 1000 * 100


@pytest.mark.parametrize("command", [
    ["export", "RUN"], ["train", "--resume", "RUN"], ["eval", "--env", "math_verify", "--model", "RUN"],
    ["eval", "--resume", "RUN"], ["compare", "RUN", "RUN"],
])  # fmt: skip
def test_a_config_of_aliases_is_one_line_for_every_command(zoo, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / "runs" / "config of aliases", "RUN")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "RUN/config.yaml:" in error
    assert "counting what its aliases (*name) stand for" in error


@pytest.mark.parametrize("text", ["a: &a [1, *a]", "a: &a {b: *a}", f"a: {DEEP}", aliases(), "a: 1\na: 2"])
def test_yaml_that_stands_for_too_much_is_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        read_yaml(path)


def test_aliases_of_use_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {lr: 1, roles: &r [a, b]}\nstages: [*base, {<<: *base, lr: 2}]\nagain: *r\n")
    base = {"lr": 1, "roles": ["a", "b"]}
    assert read_yaml(path) == {"base": base, "stages": [base, {**base, "lr": 2}], "again": ["a", "b"]}


def test_runs_and_show_pass_over_what_is_wrong(zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    (zoo / "runs" / "first" / "1a-x").mkdir(exist_ok=True)
    assert main(["runs"]) == 0
    rows = {line[:26].strip(): line[26:] for line in capsys.readouterr().out.splitlines()}
    assert "unfinished" in rows["first"]
    assert "unfinished" in rows["metrics that are none"]
    for name in ("metrics without an end", "summary of another", "a summary that waits"):
        assert any(name in row and "unreadable" in text for row, text in rows.items()), rows
    assert main(["show", "first", "--count", "1"]) == 0
    assert main(["show", "steps without a number", "--count", "1"]) == 0
    assert "1 of 16 episodes of step 1" in capsys.readouterr().out


def raw(url, request):
    """The head and the body of the answer to bytes."""
    host, port = urllib.parse.urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode(), body


@pytest.mark.parametrize(("host", "more"), [
    ("[x", ""), ("127.0.0.1:x[", ""), ("127.0.0.1", "Origin: http://[x\r\n"),
    ("127.0.0.1", "Cookie: envgym-view=\xff\xfe\r\n"),
])  # fmt: skip
def test_what_no_handler_knows_is_a_bad_request_with_the_usual_headers(zoo, tmp_path, host, more):
    token = tmp_path / "token"
    token.write_text("s3cret-0123456789\n")
    token.chmod(0o600)
    words = ["--token-file", str(token)] if "Cookie" in more else []
    with viewing(zoo, "runs/first", *words) as url:
        request = f"GET /api?q=index HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n"
        head, body = raw(url, request.encode("latin-1"))
        assert head.startswith("HTTP/1.1 400 "), head
        assert list(json.loads(body)) == ["error"]
        for name in ("Content-Security-Policy: default-src 'self'", "X-Content-Type-Options: nosniff"):
            assert name in head
