"""The helpers behind `make demo`: the model folder, the server's process group, the last line."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from examples import server as server_module
from examples import smollm2
from examples.server import Server, ServerError, free_port, process_group
from vllm_spd.config import SPDConfig

EXAMPLES = Path(smollm2.__file__).parent
STUBBORN = ["sh", "-c", "trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & while :; do sleep 1; done"]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/demo.py is a script: it imports its neighbours by their bare names."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return smollm2.prepare()


@pytest.fixture
def no_server() -> Iterator[Server]:
    server = Server("no-such-model", timeout=1, grace=1)
    yield server
    server.stop()


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SPD_CACHE", str(tmp_path))
    assert smollm2.folder() == tmp_path / smollm2.NAME
    monkeypatch.delenv("VLLM_SPD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.folder() == tmp_path / ".cache" / "vllm-spd" / smollm2.NAME


def test_a_prepared_model_is_not_converted_again(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "convert", None)
    assert smollm2.prepare() == smollm2_dir


@pytest.mark.parametrize("missing", [*smollm2.FILES, "chat_template.jinja"])
def test_a_folder_that_lacks_a_file_is_incomplete(missing: str, smollm2_dir: Path, tmp_path: Path) -> None:
    for file in smollm2_dir.iterdir():
        if file.name != missing:
            (tmp_path / file.name).symlink_to(file)
    assert not smollm2.is_complete(tmp_path)


def test_an_incomplete_folder_is_replaced(tmp_path: Path, smollm2_dir: Path) -> None:
    target, fresh = tmp_path / "target", tmp_path / "fresh"
    target.mkdir()
    fresh.mkdir()
    for file in smollm2_dir.iterdir():
        (fresh / file.name).symlink_to(file)
    smollm2.publish(fresh, target)
    assert smollm2.is_complete(target)


def test_a_process_that_converted_first_keeps_its_folder(tmp_path: Path, smollm2_dir: Path) -> None:
    fresh, target = tmp_path / "fresh", tmp_path / "target"
    for path in (fresh, target):
        path.mkdir()
        for file in smollm2_dir.iterdir():
            (path / file.name).symlink_to(file)
    smollm2.publish(fresh, target)
    assert smollm2.is_complete(target)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match=r"^no-such-package is not installed: run `pip install .*`\.$"):
        smollm2.find_gguf()


def test_free_ports_can_be_bound() -> None:
    assert 1024 <= free_port() <= 65535


def test_a_process_group_lists_grandchildren_and_not_zombies() -> None:
    leader = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
    deadline = time.monotonic() + 10
    while len(process_group(leader.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(process_group(leader.pid)) == 3
    os.killpg(leader.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while process_group(leader.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_group(leader.pid) == []  # the leader is a zombie until it is waited for
    leader.wait()


def test_a_server_that_ignores_sigterm_is_killed_whole(no_server: Server) -> None:
    no_server.command = STUBBORN
    with pytest.raises(ServerError, match="was not ready after"):
        no_server.start()
    assert no_server.process is not None
    assert len(no_server.killed) >= 2
    assert process_group(no_server.process.pid) == []


def test_a_server_that_ends_while_loading_shows_its_log(no_server: Server) -> None:
    no_server.command = ["sh", "-c", "echo the reason; exit 3"]
    with pytest.raises(ServerError, match="ended with status 3 while loading") as error:
        no_server.start()
    assert error.value.log == "the reason"


def test_counters_are_summed_over_labels(no_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reply:
        def read(self) -> bytes:
            return b'# TYPE drafts_total counter\ndrafts_total{e="0"} 3.0\ndrafts_total{e="1"} 4.0\ndrafts_total_b 9\n'

    monkeypatch.setattr(server_module.urllib.request, "urlopen", lambda *_, **__: Reply())
    assert no_server.counter("drafts_total") == 7
    assert no_server.counter("absent_total") == 0


def test_the_last_line_of_the_demo(demo: ModuleType) -> None:
    plain, spd = demo.Run("same", 28.06, 0.0), demo.Run("same", 41.24, 0.634)
    line = "plain 28.1 tok/s | SPD 41.2 tok/s | speed-up 1.47x | acceptance 0.63 | identical"
    assert demo.summary(plain, spd, True) == f"{line} yes"
    assert demo.summary(plain, spd, False) == f"{line} no"


@pytest.mark.parametrize(("spd_text", "status"), [("same", 0), ("other", 1)])
def test_the_demo_fails_when_the_texts_differ(
    spd_text: str, status: int, demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"SPD": demo.Run(spd_text, 2.0, 1.0), "plain vLLM": demo.Run("same", 1.0, 0.0)}
    monkeypatch.setattr(demo, "prepare", lambda: Path("model"))
    monkeypatch.setattr(demo, "run", lambda title, *_: runs[title])
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert demo.main() == status
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"identical {'yes' if status == 0 else 'no'}")


def test_the_demo_speculates_with_the_shipped_head(demo: ModuleType) -> None:
    config = SPDConfig.from_speculative_config(demo.speculative_config(), demo.STAGES)
    assert config.drafter == "pdm" and config.stage_layers is not None and sum(config.stage_layers) == 30
