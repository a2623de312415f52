"""A `vllm serve` in its own process group: started on a free port, waited for, and taken down to the last process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["Server", "ServerError", "free_port", "kill_group", "process_group"]

HOST = "127.0.0.1"


class ServerError(RuntimeError):
    """The server ended or stayed silent; the message is one sentence, `log` holds the last lines it printed."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def process_group(pgid: int) -> list[int]:
    """Living processes of the group; zombies, which only wait to be reaped, are not counted."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == pgid and state not in "ZX":
            members.append(int(stat.parent.name))
    return members


class Server:
    """`with Server(model, "-pp", "2") as server:` serves `model` under `server.name` at `server.url`.

    `waiting(seconds)` is called about every ten seconds while the engine loads; `env` is added to the environment.
    """

    name = "model"

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        timeout: float = 600,
        grace: float = 30,
        waiting: Callable[[int], None] = lambda seconds: None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.timeout = timeout
        self.grace = grace
        self.waiting = waiting
        self.env = {**os.environ, **(env or {})}
        self.command = [*vllm_command(), "serve", str(model), *self.address(), *flags]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self.process: subprocess.Popen[bytes] | None = None
        self.killed: list[int] = []  # processes that did not end by themselves

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def address(self) -> Sequence[str]:
        return ["--host", HOST, "--port", str(self.port), "--served-model-name", self.name]

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=self.env,
        )
        try:
            self.wait_until_ready(self.process)
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        begin = time.monotonic()
        reported = 0
        while not self.is_ready():
            waited = int(time.monotonic() - begin)
            if process.poll() is not None:
                raise ServerError(f"The server ended with status {process.returncode} while loading.", self.tail())
            if waited > self.timeout:
                raise ServerError(f"The server was not ready after {waited} s.", self.tail())
            if waited // 10 > reported:
                reported = waited // 10
                self.waiting(waited)
            time.sleep(0.25)

    def is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def counter(self, name: str) -> float:
        """Sum over all label sets of a Prometheus counter, 0 if the server does not export it."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(value) for _, _, value in samples)

    def tail(self, lines: int = 40) -> str:
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-lines:])

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL for what is left after `grace` seconds; returns the exit status of `vllm serve`."""
        process = self.process
        if process is None:
            return None
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            self.await_empty(process)
        finally:  # also when the user loses patience and presses Ctrl-C again
            self.killed += kill_group(process.pid)
        return process.wait()

    def await_empty(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline and (process.poll() is None or process_group(process.pid)):
            time.sleep(0.1)


def vllm_command() -> list[str]:
    """The `vllm` command of the running interpreter's environment, activated or not."""
    beside = Path(sys.executable).parent / "vllm"
    return [str(beside)] if beside.exists() else ["vllm"]


def kill_group(pgid: int, seconds: float = 10) -> list[int]:
    """SIGKILL for every living process of the group; returns those that had to die, once they are gone."""
    victims: set[int] = set()
    deadline = time.monotonic() + seconds
    while (members := process_group(pgid)) and time.monotonic() < deadline:
        victims.update(members)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, signal.SIGKILL)
        time.sleep(0.02)
    return sorted(victims)
