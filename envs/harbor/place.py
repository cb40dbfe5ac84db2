"""A place for Harbor's tasks without a container engine: a box (see `jail.box`) with this machine's system.

Harbor's interpreter imports this, and nothing of envgym but the sandbox's program. The policy's box has neither
`/tests` nor `/solution` nor `/logs/verifier`. For the verifier, and for the oracle, the box ends with all that runs in
it; a new one has the same files and those folders. Files go in and out as archives that are packed or unpacked by a
program in the box, so that no link leads out of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import string
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import EnvironmentConfig, NetworkMode
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier

IS_ROOT = os.geteuid() == 0
SANDBOX = Path(__file__).parents[2] / "sandbox"
MAX_OUTPUT = 2**20
"""Bytes of each output stream of a command that Harbor gets; what is printed after them is dropped."""
MAX_DOWNLOAD = 2**30
"""Bytes of an archive or a file that comes out of a box."""
TRANSFER_SECONDS = 300.0
START_SECONDS = 60.0
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from jail.box import main; main()"
_NOBODY = 65534
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WRITABLE = ("/app", "/home", "/mnt", "/opt", "/run", "/srv", "/tmp", "/var", "/root", "/logs/agent", "/logs/artifacts")
_PRIVATE = {"agent": (), "solution": ("/solution",), "verifier": ("/tests", "/logs/verifier")}
"""The folders of each phase that the policy never sees. They are empty when the phase begins."""

_SYSTEM = re.compile("/(|bin|boot|dev|etc|lib|lib32|lib64|logs|proc|sbin|solution|sys|tests|usr)")
"""Folders that a task cannot have files in."""
_PLAIN = re.compile(
    r"(?:docker\.io/)?(?:library/)?(debian|ubuntu|python|buildpack-deps)(?::(3\.\d+)?[\w.-]*)?(?:@\S+)?"
)
_HARMLESS = re.compile(
    r"|true|apt(-get)?( -\w+)* (update|clean|autoremove)( -\w+)*|rm -rf( /var/lib/apt/lists/?\*?| /tmp/\*)+"
)
_OPTION = re.compile("-(p|y|y?qq?|-yes|-quiet|-no-install-recommends)|DEBIAN_FRONTEND=noninteractive")
"""A word of a command that makes no difference here."""


class NeedsContainer(ValueError):
    """A task that needs more than a plain system."""

    def __init__(self, need: str) -> None:
        super().__init__(f"it needs {need}: a container engine (env.place=docker or podman)")


@dataclass
class Image:
    """A plain system: the part of a Dockerfile that can be had without a container engine."""

    workdir: str = "/"
    environ: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    copies: list[tuple[Path, str]] = field(default_factory=list)
    """Files and folders of the task, and the paths that they get."""

    def path(self, name: str) -> str:
        return os.path.normpath(os.path.join(self.workdir, name))

    def mounts(self) -> set[str]:
        """The writable folders of the box. Raises `NeedsContainer` for a path in none of them."""
        mounts = set(_WRITABLE)
        for path in (*self.folders, *(target for _, target in self.copies)):
            if not any(f"{path}/".startswith(f"{mount}/") for mount in mounts):
                mounts.add(mount := "/" + path.split("/")[1])
                if _SYSTEM.fullmatch(mount):
                    raise NeedsContainer(f"files in {path}")
        return mounts


def check_network(mode: NetworkMode | None) -> None:
    """Raise `NeedsContainer` for a network that the local place lacks."""
    if mode not in (None, NetworkMode.NO_NETWORK) and not (Local.offline and mode == NetworkMode.PUBLIC):
        raise NeedsContainer(f"a network (network_mode = {mode.value!r})")


def read_image(folder: Path, config: EnvironmentConfig, *, has_tests: bool = False) -> Image:
    """The image of an environment. `has_tests`: it is a verifier's, with its tests, which Harbor uploads anyway.

    Raises `NeedsContainer` by what else it needs.
    """
    image, dockerfile = Image(), folder / "Dockerfile"
    text = f"FROM {config.docker_image or 'that its task.toml does not name'}"
    if dockerfile.exists():
        text = re.sub(r"(?m)^[ \t]*#.*\n?", "", dockerfile.read_text(encoding="utf-8"))
    for line in filter(None, map(str.strip, re.sub(r"\\[ \t]*\n", " ", text).splitlines())):
        name, _, value = line.partition(" ")
        _read_instruction(image, folder, name.upper(), value.strip())
    if (folder / "docker-compose.yaml").exists():
        raise NeedsContainer("a docker-compose.yaml")
    if "network_mode" in config.model_fields_set:
        check_network(config.network_mode)
    if config.gpus or config.tpu:
        raise NeedsContainer("GPUs or TPUs")
    if has_tests:
        image.copies = [(source, path) for source, path in image.copies if not f"{path}/".startswith("/tests/")]
        image.folders = [path for path in image.folders if not f"{path}/".startswith("/tests/")]
    image.workdir = image.path(config.workdir or (image.workdir if image.workdir != "/" else "/app"))
    image.folders.append(image.workdir)
    image.mounts()
    return image


def _read_instruction(image: Image, folder: Path, name: str, value: str) -> None:
    words = shlex.split(string.Template(value).safe_substitute({"PATH": _PATH, **image.environ}))
    if name == "FROM" and not image.folders:
        _check_system(value)
    elif name == "WORKDIR":
        image.workdir = image.path(words[0])
        image.folders.append(image.workdir)
    elif name == "ENV":
        pairs = [word.partition("=") for word in words] if "=" in words[0] else [(words[0], "=", " ".join(words[1:]))]
        image.environ |= {key: text for key, _, text in pairs}
    elif name in ("COPY", "ADD") and not re.search(r"(^|\s)--|://|^\[", value):
        target = image.path(words[-1])
        paths = [path for word in words[:-1] for path in sorted(glob(f"{folder}/{word}", include_hidden=True))]
        sources = list(map(Path, paths))
        if not sources or not all(source.resolve().is_relative_to(folder.resolve()) for source in sources):
            raise NeedsContainer(f"{name} {value}")
        is_folder = words[-1].endswith(("/", ".")) or len(sources) > 1 or target in image.folders
        for source in sources:
            image.copies.append((source, f"{target}/{source.name}" if is_folder and source.is_file() else target))
    elif name == "RUN":
        for command in re.split(r"&&|;|\n", value):
            _check_command(image, command.strip())
    elif name not in ("CMD", "LABEL", "EXPOSE", "MAINTAINER") and (name, value) != ("USER", "root"):
        raise NeedsContainer(f"{name} {value}")


def _check_system(name: str) -> None:
    plain = _PLAIN.fullmatch(name)
    if plain is None or (plain[1] == "python" and plain[2] and not shutil.which(f"python{plain[2]}", path=_PATH)):
        raise NeedsContainer(f"the image {name}")


def _check_command(image: Image, command: str) -> None:
    """Let commands of a RUN pass that make folders or install what this machine has."""
    if _HARMLESS.fullmatch(command):
        return
    words = [word for word in command.split() if not _OPTION.fullmatch(word)]
    match words if all(re.fullmatch(r"[\w./+][\w./+-]*", word) for word in words) else ():
        case ["mkdir", *folders]:
            image.folders += map(image.path, folders)
        case ["apt" | "apt-get", "install", *packages]:
            for package in packages:
                if not (shutil.which(package, path=_PATH) or Path(f"/var/lib/dpkg/info/{package}.list").exists()):
                    raise NeedsContainer(f"the package {package}, which this machine does not have")
        case _:
            raise NeedsContainer(f"RUN {command}")


class Box:
    """A running box."""

    def __init__(self) -> None:
        self._control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-s", "-S", "-P", "-c", _PROGRAM, str(SANDBOX)]
        with end:  # it inherits no variables, open files or terminal
            self._process = subprocess.Popen(words, stdin=end.fileno(), env={}, cwd="/", start_new_session=True)

    async def start(self, folders: Mapping[str, str]) -> None:
        """Make the box, with `folders` of this machine by their paths in it. Raises `OSError` if that is impossible."""
        self._control.send(json.dumps({"way": "root" if IS_ROOT else "user", "folders": folders}).encode())
        self._control.setblocking(False)
        async with asyncio.timeout(START_SECONDS):
            text = await asyncio.get_running_loop().sock_recv(self._control, 2**16)
        answer = json.loads(text or b'{"failed": "it died"}')
        if "failed" in answer:
            needs = "user namespaces, or a container engine (env.place=docker or podman)"
            raise OSError(f"no box can be made here ({answer['failed']}): it needs {needs}")

    async def run(
        self, words: Sequence[str], cwd: str, environ: Mapping[str, str], streams: Sequence[IO[bytes]]
    ) -> int:
        """Run a command to its end, which comes early if this is cancelled, and return its exit status. `streams`: the
        files of its standard input, output and errors."""
        request = json.dumps({"words": words, "cwd": cwd, "environ": environ}).encode()
        caller, end = socket.socketpair()
        with caller:
            with end:
                descriptors = [*(stream.fileno() for stream in streams), end.fileno()]
                socket.send_fds(self._control, [request], descriptors)
            caller.setblocking(False)
            status = await asyncio.get_running_loop().sock_recv(caller, 64)
        if not status:
            raise RuntimeError("the box has ended")
        return int(status)

    async def close(self) -> None:
        """End the box. When this returns, nothing runs in it."""
        self._control.close()
        await asyncio.to_thread(self._process.wait)


async def check_box() -> None:
    """Raise `OSError` if this machine can make no box."""
    box = Box()
    try:
        await box.start({})
    finally:
        await box.close()


class Local(BaseEnvironment):  # type: ignore[misc]
    """This machine's system in a box, as a place for Harbor's tasks.

    Limits of time are the commands' and Harbor's; a task's CPUs, memory and storage are not limits here.
    """

    offline: ClassVar[bool] = False
    """Tasks that ask for the internet run without it."""
    _phase = "agent"
    _box: Box | None = None

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        self._folders: list[str] = []
        has_tests = not self._enable_environment_dir_upload
        self._image = read_image(self.environment_dir, self.task_env_config, has_tests=has_tests)

    async def start(self, force_build: bool) -> None:
        self._files = {path: self._make_folder() for path in self._image.mounts()}
        async with self._transfer(shlex.join(["mkdir", "-p", *self._image.folders]), "/"):
            pass
        for source, path in self._image.copies:
            await self.upload_file(source, path)
        await self._upload_environment_dir_after_start()

    def _make_folder(self) -> str:
        """An empty folder of this machine, of the user that the box's root is here."""
        folder = tempfile.mkdtemp()
        self._folders.append(folder)
        if IS_ROOT:
            os.chown(folder, _NOBODY, _NOBODY)
        return folder

    async def enter(self, phase: str) -> None:
        """End all that runs in the box, so that the next command begins a phase, with its private folders empty."""
        self._phase, box, self._box = phase, self._box, None
        if box is not None:
            await box.close()

    async def _open(self) -> Box:
        if self._box is None:
            self._box = Box()
            await self._box.start(self._files | {path: self._make_folder() for path in _PRIVATE[self._phase]})
        return self._box

    async def stop(self, delete: bool) -> None:
        await self.enter("agent")
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", *self._folders], stderr=subprocess.DEVNULL)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self._resolve_user(user) not in (None, "root", 0, "0"):
            raise RuntimeError(f"the local place has no user {self._resolve_user(user)}, only root")
        directory = cwd or self._image.workdir
        try:
            async with self._run(command, cwd=directory, env=env, seconds=timeout_sec) as (status, stdout, stderr):
                code = status if status >= 0 else 128 - status
                return ExecResult(stdout=_read(stdout), stderr=_read(stderr), return_code=code)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None

    @asynccontextmanager
    async def _run(
        self, script: str, *words: str, stdin: IO[bytes] | None = None, cwd: str = "/",
        env: dict[str, str] | None = None, seconds: float | None,
    ) -> AsyncIterator[tuple[int, IO[bytes], IO[bytes]]]:  # fmt: skip
        """Have the shell run a script: its exit status, output and errors. Raises `TimeoutError`."""
        environ = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **self._image.environ}
        environ |= self._merge_env(env) or {}
        file = tempfile.TemporaryFile
        with stdin or file() as source, file() as stdout, file() as stderr:
            async with asyncio.timeout(seconds):
                box = await self._open()
                status = await box.run(["bash", "-c", script, "bash", *words], cwd, environ, (source, stdout, stderr))
            stdout.seek(0)
            yield status, stdout, stderr

    @asynccontextmanager
    async def _transfer(self, script: str, path: str, stdin: IO[bytes] | None = None) -> AsyncIterator[IO[bytes]]:
        """The output of a script that the shell runs on a path. Raises `RuntimeError` if it fails."""
        async with self._run(script, path, stdin=stdin, seconds=TRANSFER_SECONDS) as (status, stdout, stderr):
            if status:
                raise RuntimeError(f"{path}: {_read(stderr)}")
            yield stdout

    async def _upload(self, sources: Mapping[str, Path], folder: str) -> None:
        if f"{folder}/".startswith("/solution/") and self._phase != "solution":
            await self.enter("solution")
        with tempfile.TemporaryFile() as archive:
            with tarfile.TarFile(fileobj=archive, mode="w") as tar:
                for name, source in sources.items():
                    tar.add(source, arcname=name)
            archive.seek(0)
            script = 'mkdir -p -- "$1" && exec tar -xf - --no-same-owner -C "$1"'
            async with self._transfer(script, folder, archive):
                pass

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = PurePosixPath(target_path)
        await self._upload({target.name: Path(source_path).resolve()}, str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload({path.name: path for path in Path(source_dir).iterdir()}, str(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        script = f'test -f "$1" && exec head -c {MAX_DOWNLOAD} -- "$1"'
        async with self._transfer(script, source_path) as file:
            Path(target_path).parent.mkdir(parents=True, exist_ok=True)
            with Path(target_path).open("wb") as target:
                await asyncio.to_thread(shutil.copyfileobj, file, target)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        # Status 1 is a file that changed meanwhile. An archive that is cut is an error when it is read.
        script = f'{{ tar -cf - --hard-dereference -C "$1" . || test $? = 1; }} | head -c {MAX_DOWNLOAD}'
        async with self._transfer(f"set -o pipefail; {script}", source_dir) as file:
            with tarfile.open(fileobj=file) as tar:
                await asyncio.to_thread(tar.extractall, target_dir, filter=_take_regular)


def _read(file: IO[bytes]) -> str:
    """The beginning of a command's output, and how much more there is."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), MAX_OUTPUT, 0).decode(errors="replace")
    return text if size <= MAX_OUTPUT else f"{text}\n[{size - MAX_OUTPUT} more bytes]"


def _take_regular(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Files and folders below `folder`; no links, which could lead out of it, and no devices."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        return None
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


class Guard(Verifier):  # type: ignore[misc]
    """Harbor's verifier, in a phase of its own."""

    async def verify(self) -> VerifierResult:
        assert isinstance(self.environment, Local)
        await self.environment.enter("verifier")
        try:
            return await super().verify()
        finally:
            await self.environment.enter("agent")
