"""Names of environments, learners and agents: what a user may write and what a mistake is told."""

import asyncio
import importlib.metadata
import string
import subprocess
import sys
import textwrap
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envgym
from envgym import registry
from envgym.errors import ConfigError, MissingDependency, NameNotFound, VersionNotFound
from envgym.tasks.named_sets import task_set_files

GUESS = """
import envgym

class Guess(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        self.number = self.rng.randrange(10)
        return "Guess a digit.", {}

    async def step(self, action):
        return "", float(action.text == str(self.number)), True, False, {}
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="guess.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


class One(envgym.Env):
    class Config(envgym.EnvConfig):
        size: int = 1

    async def reset(self, *, seed=None, options=None):
        return "say", {}

    async def step(self, action):
        return "", 1.0, True, False, {}


class Two(One):
    pass


def test_shortest_environment_in_a_file_plays(write):
    async def play(name):
        env = envgym.make(name)
        observation, _ = await env.reset(seed=3)
        number = env.number
        _, reward, terminated, _, _ = await env.step(envgym.Action(str(number)))
        return observation.text, number, reward, terminated

    path = write(GUESS)
    text, number, reward, terminated = asyncio.run(play(str(path)))
    assert (text, reward, terminated) == ("Guess a digit.", 1.0, True)
    assert asyncio.run(play(f"{path}:Guess"))[1] == number, "the same seed draws the same number"


def test_a_file_is_one_module_and_its_relative_name_holds_elsewhere(write, monkeypatch):
    path = write(GUESS)
    monkeypatch.chdir(path.parent)
    relative = registry.spec("guess.py:Guess")
    monkeypatch.chdir("/")
    assert registry.spec_from_json(relative.to_json()) == relative
    assert type(registry.spec(str(path)).make().unwrapped) is type(relative.make().unwrapped)


def test_a_file_may_import_its_neighbour(write):
    write("REWARD = 0.5", "neighbour_of_guess.py")
    path = write("from neighbour_of_guess import REWARD\n" + textwrap.dedent(GUESS), "with_neighbour.py")
    assert registry.spec(str(path)).make()


def test_import_path_from_the_working_directory(write, monkeypatch):
    path = write(GUESS, "guess_module_in_cwd.py")
    monkeypatch.chdir(path.parent)
    assert registry.spec("guess_module_in_cwd:Guess").id == "guess_module_in_cwd:Guess"


def test_spec_beside_its_env_is_the_one_meant(write):
    path = write(GUESS + "\nclass GuessSpec(envgym.EnvSpec):\n    env_class = Guess\n")
    assert type(registry.spec(str(path))).__name__ == "GuessSpec"


@pytest.mark.parametrize(
    ("text", "name", "error", "message"),
    [
        (None, "{}", NameNotFound, r"there is no file .*guess.py"),
        ("x = 1", "{}", NameNotFound, r"guess.py defines no environment"),
        (GUESS, "{}:Gues", NameNotFound, r"defines no 'Gues'. Did you mean 'Guess'\?"),
        (GUESS, "{}:envgym", ConfigError, r"must be a subclass of envgym.env.EnvSpec or envgym.env.Env"),
        (GUESS + "\nclass Other(envgym.Env):\n    reset = step = Guess.step\n", "{}", NameNotFound,
         r"more than one environment: choose .*guess.py:Guess or .*guess.py:Other"),
        ("import envgym\nclass Half(envgym.Env):\n    async def reset(self, **kwargs): ...\n", "{}", ConfigError,
         r"Half .*does not define step"),
        ("x = 1\ny = (\n", "{}", ConfigError, r"guess.py, line 2: SyntaxError: '\(' was never closed"),
        ("import json\n\njson.loads('{')\n", "{}", ConfigError, r"guess.py, line 3: JSONDecodeError"),
        ("import no_such_thing", "{}", ConfigError, r"guess.py, line 1: ModuleNotFoundError: .*no_such_thing"),
        ("raise SystemExit(3)", "{}", ConfigError, r"guess.py, line 1: SystemExit: 3"),
        ("from envgym.errors import missing_package\nraise missing_package('p', 'x', 'it')", "{}", MissingDependency,
         r"-m pip install p$"),
        (None, "no_such_package.module:Name", NameNotFound, r"no Python module 'no_such_package'"),
        (None, "json.no_such_module:Name", NameNotFound, r"no Python module 'json.no_such_module'"),
        (None, "json:JSONDecodr", NameNotFound, r"json defines no 'JSONDecodr'. Did you mean 'JSONDecode"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_told_in_one_line(write, tmp_path, text, name, error, message):
    if text is not None:
        write(text)
    with pytest.raises(error, match=message) as raised:
        registry.spec(name.format(tmp_path / "guess.py"))
    assert "\n" not in str(raised.value)


def test_unversioned_means_newest_and_older_warns():
    registry.register("lab/One-v2", One)
    registry.register("lab/One-v10", Two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.spec("lab/One").id == "lab/One-v10"
        assert isinstance(registry.make("lab/One-v10").unwrapped, Two)
    with pytest.warns(DeprecationWarning, match=r"lab/One-v2 is out of date: use lab/One-v10"):
        assert not isinstance(registry.make("lab/One-v2").unwrapped, Two)
    with pytest.raises(VersionNotFound, match=r"no version v3 .* lab/One-v10, lab/One-v2"):
        registry.spec("lab/One-v3")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("math_verfy", "math_verify"), ("lab/Oen", "lab/One"), ("lba/One", "lab/One"), ("One-v1", "lab/One")],
)
def test_misspelt_id_names_its_nearest_neighbour(name, nearest):
    registry.register("lab/One-v0", One)
    with pytest.raises(NameNotFound, match=rf"there is no environment '{name}'. Did you mean '{nearest}'\?"):
        registry.spec(name)


def test_registering():
    registry.register("One-v0", One)
    with pytest.raises(ConfigError, match="give all of a name's ids a version, or none"):
        registry.register("One", One)
    with pytest.raises(ConfigError, match="malformed environment id"):
        registry.register("one two", One)
    with pytest.warns(UserWarning, match="'One-v0' is registered again, and replaced"):
        registry.register("One-v0", Two, size=2)
    assert "One-v0" in registry.list_ids()
    assert "math_verify-v0" in registry.list_ids()


def test_registering_by_keyword_as_in_gymnasium():
    registry.register(id="One-v0", entry_point=One, kwargs={"size": 2, "call_timeout": 3}, size=4)
    config = registry.spec("One").config
    assert (config.size, config.call_timeout) == (4, 3)
    assert registry.make("One", size=5).config.size == 5


def test_settings_are_checked_and_a_spec_is_json():
    registry.register("One-v0", One, size=2)
    assert registry.spec("One").config.size == 2
    given_spec = registry.spec("One", size=3)
    assert registry.spec_from_json(given_spec.to_json()) == given_spec != registry.spec("One")
    with pytest.raises(ConfigError, match=r"environment One-v0: unknown key 'sice'. Did you mean 'size'\?"):
        registry.spec("One", sice=1)
    with pytest.raises(ConfigError, match="not an environment's description"):
        registry.spec_from_json("[]")


def test_registered_later_module_is_imported_only_when_asked_for(write, monkeypatch):
    path = write(GUESS, "guess_entry.py")
    monkeypatch.syspath_prepend(path.parent)
    registry.register("guess-v0", "guess_entry:Guess")
    assert "guess_entry" not in sys.modules
    assert registry.make("guess").spec.id == "guess-v0"


ADAPTER = """
import envgym

class Adapted(envgym.EnvSpec):
    pass

def adapt(path, name):
    return Adapted if "foreign" in path.read_text() else None
"""


def test_a_package_makes_environments_of_files_for_another_program(write, monkeypatch):
    """They are asked before the file is imported, and the first that knows it wins."""
    write(ADAPTER, "adapter_of_files.py")
    monkeypatch.syspath_prepend(write("", "guess.py").parent)
    entry_points = registry.entry_points
    mine = {"none": "envgym.envs.openrlhf:environment_of", "mine": "adapter_of_files:adapt"}
    monkeypatch.setattr(
        registry, "entry_points", lambda group: mine if group == "envgym.files" else entry_points(group)
    )
    foreign = write("raise RuntimeError('foreign')", "of_another_program.py")
    spec = registry.spec(str(foreign))
    assert type(spec).__name__ == "Adapted"
    assert registry.spec_from_json(spec.to_json()) == spec
    assert not any("of_another_program" in name for name in sys.modules)
    assert type(registry.spec(str(write(GUESS))).make().unwrapped).__name__ == "Guess"
    registry.register("lab/Other-v0", str(foreign))
    assert type(registry.spec("lab/Other")).__name__ == "Adapted"


def test_learners_in_files_and_by_name(write):
    path = write("""
        from envgym.learner import Learner

        class Mine(Learner):
            def prepare(self, groups): ...
            def loss(self, role, outputs, batch, normalizers): ...
        """)
    assert registry.load_component("learner", str(path)) is registry.load_component("learner", f"{path}:Mine")
    with pytest.raises(NameNotFound, match=r"there is no learner 'gpro'. Did you mean 'grpo'\?"):
        registry.load_component("learner", "gpro")
    with pytest.raises(NameNotFound, match=r"there is no learner 'xyz'. There is distill, dpo, dr_grpo, grpo, "):
        registry.load_component("learner", "xyz")


def test_checkout_without_installation_says_so(monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(registry, "entry_points", lambda group: {})
    with pytest.raises(NameNotFound, match="envgym is not installed here"):
        registry.spec("math_verify")


def test_import_envgym_is_light():
    code = (
        "import sys, envgym; print(sorted(m for m in ('pydantic', 'aiohttp', 'asyncio', 'torch') if m in sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_exported_name_is_there():
    assert all(getattr(envgym, name) is not None for name in envgym.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        envgym.nonsense  # noqa: B018


# -- agreement with Gymnasium ----------------------------------------------------------------------------

ID_TEXT = st.text(alphabet=string.ascii_letters + string.digits + "-_:./ v", max_size=16) | st.text(max_size=6)
NAMES = st.text(alphabet="abcdeOne", min_size=2, max_size=8)


@given(ID_TEXT | st.tuples(ID_TEXT, ID_TEXT, st.integers(0, 99)).map(lambda p: f"{p[0]}/{p[1]}-v{p[2]}"))
@settings(max_examples=500, deadline=None)
def test_ids_are_parsed_as_gymnasium_parses_them(id):
    from gymnasium.envs import registration
    from gymnasium.error import Error

    try:
        expected = registration.parse_env_id(id)
    except Error:
        with pytest.raises(ConfigError):
            registry.parse_env_id(id)
        return
    assert registry.parse_env_id(id) == expected
    assert registry.env_id(*expected) == registration.get_env_id(*expected)


@given(names=st.lists(NAMES, min_size=1, max_size=6, unique=True), asked=NAMES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_suggestions_are_gymnasiums(names, asked):
    from gymnasium.envs import registration
    from gymnasium.error import NameNotFound as GymnasiumNameNotFound

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", {})
        patch.setattr(registry, "entry_points", lambda group: {})
        patch.setattr(registration, "registry", {})
        for name in names:
            registry.register(f"lab/{name}-v0", One)
            registration.register(f"lab/{name}-v0", One)
        registry.register(f"labs/{asked}-v0", One)  # nearer as a whole, but of another namespace
        registration.register(f"labs/{asked}-v0", One)
        if asked in names:
            return
        with pytest.raises(GymnasiumNameNotFound) as theirs:
            registration._check_version_exists("lab", asked, 0)
        with pytest.raises(NameNotFound) as ours:
            registry.find(f"lab/{asked}-v0")
        if "Did you mean" in str(theirs.value):
            suggestion = str(theirs.value).split("`")[-2]
            assert f"Did you mean 'lab/{suggestion}'?" in str(ours.value)


def test_a_setting_may_be_called_id():
    """It is the environment's own, not the id that it is registered under."""

    class Config(envgym.EnvConfig):
        id: str = "one"

    class Named(envgym.Env):
        async def reset(self, *, seed=None, options=None):
            return self.spec.config.id, {}

        async def step(self, action): ...

    Named.Config = Config
    assert envgym.EnvSpec("Named-v0", Named, id="two").config.id == "two"
    with pytest.raises(ConfigError, match="unknown key 'id'"):
        registry.spec("math_verify", id="x")


def test_what_make_gives_closes_the_environment_that_was_made_for_it_alone():
    torn_down = []

    class Spec(envgym.EnvSpec):
        env_class = One

        async def teardown(self):
            torn_down.append(self)

    envgym.register("Torn-v0", Spec)

    async def played(env):
        await env.reset(seed=0)
        await env.close()

    shared = envgym.spec("Torn-v0")
    asyncio.run(played(shared.make()))
    assert torn_down == []
    asyncio.run(played(envgym.make("Torn-v0")))
    assert len(torn_down) == 1


def test_a_packages_malformed_id_stands_in_nobodys_way(monkeypatch):
    offered = {"not an id!": "nowhere:Nothing", "Fine-v1": f"{__name__}:One"}
    monkeypatch.setattr(registry, "entry_points", lambda group: offered if group == "envgym.envs" else {})
    assert set(registry.list_ids()) - set(task_set_files()) == {"Fine-v1"}
    assert registry.is_installed("Fine")
    assert registry.find("Fine").id == "Fine-v1"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ws://127.0.0.1:8000/ws", r"ws://…: environments are served at http://.*write http://… .*, openenv:http://…"),
        ("wss://user:secret@host/ws", "write https://… for a server of envgym"),
        ("ftp://host/game", "ftp://…: environments are served at http://HOST:PORT/NAME"),
    ],
)
def test_a_url_of_another_scheme_is_said_to_be_one(url, says):
    with pytest.raises(ConfigError, match=says) as error:
        registry.spec(url)
    assert "secret" not in str(error.value)
    assert "harbor:" not in str(error.value)  # a path, not a URL


class Elsewhere(envgym.EnvSpec):
    env_class = One


def test_a_scheme_that_a_package_brings_wins_and_python_names_an_import(monkeypatch):
    entry_points = registry.entry_points
    schemes = {"openenv": f"{__name__}:Elsewhere", __name__.partition(".")[0]: f"{__name__}:Elsewhere"}
    monkeypatch.setattr(
        registry, "entry_points", lambda group: schemes if group == "envgym.schemes" else entry_points(group)
    )
    for name in ("openenv:game", "openenv://host/game", f"{__name__.partition('.')[0]}:One"):
        spec = registry.spec(name)
        assert (type(spec), spec.id) == (Elsewhere, name)
        assert registry.spec_from_json(spec.to_json()) == spec
    imported = registry.spec(f"python:{__name__}:One", size=3)
    assert (type(imported.make().unwrapped), imported.config.size) == (One, 3)
    assert registry.spec_from_json(imported.to_json()) == imported


def test_a_setting_may_say_where_an_environment_is_that_nobody_registered():
    assert registry.spec("far", urls=["http://127.0.0.1:1"]).config.urls == ("http://127.0.0.1:1",)
    with pytest.raises(NameNotFound):
        registry.spec("far")


def test_the_registry_imports_no_client():
    code = (
        "import sys, envgym.registry as r; r.spec('math_verify')\n"
        "print([name for name in sys.modules if name.startswith('envgym.remote.')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_setting_called_name_is_refused(tmp_path):
    """It would stand where the agent is selected."""
    path = tmp_path / "named.py"
    path.write_text(
        "from envgym.agent import AgentConfig\nfrom envgym.agents.token_level import SingleTurn\n"
        "class Settings(AgentConfig):\n    name: str = ''\n"
        "class Named(SingleTurn):\n    Config = Settings\n"
    )
    with pytest.raises(ConfigError, match=r"a setting cannot be called name, which selects the agent: rename it"):
        registry.load_component("agent", f"{path}:Named")
