"""What pip installs, and the bootstrap between a bare Python and a working environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from scripts import bootstrap

ROOT = Path(__file__).resolve().parents[2]


def fake_nvidia_smi(folder: Path, gpus: int, status: int = 0) -> None:
    lines = "".join(f"echo 'GPU {index}: a model (UUID: {index})'\n" for index in range(gpus))
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{lines}exit {status}\n")
    script.chmod(0o755)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy: a build folder left in the tree would leak into later wheels."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vllm_spd", "kernels", "tests", "examples", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"vllm_spd", f"vllm_spd-{metadata.version('vllm-spd')}.dist-info"}
    for file in (ROOT / "vllm_spd").rglob("*.py"):
        assert file.relative_to(ROOT).as_posix() in wheel


def test_kernels_are_installed_inside_the_package(wheel: list[str]) -> None:
    for file in (ROOT / "kernels").glob("*.py"):
        assert f"vllm_spd/kernels/{file.name}" in wheel


def test_the_bare_package_depends_on_nothing() -> None:
    assert [entry for entry in metadata.requires("vllm-spd") or [] if "extra ==" not in entry] == []


def test_extras() -> None:
    declared = set(metadata.metadata("vllm-spd").get_all("Provides-Extra") or [])
    assert {"cpu", "cuda", "train", "ray", "dev"} <= declared


def test_vllm_finds_the_plugin() -> None:
    (entry,) = metadata.entry_points(group="vllm.general_plugins", name="spd")
    assert callable(entry.load())


def test_the_console_script_loads() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="vllm-spd")
    assert callable(entry.load())


def test_the_vllm_command_starts() -> None:
    command = Path(sys.executable).parent / "vllm"
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1].startswith("0.32.")


@pytest.mark.parametrize(
    ("gpus", "status", "flavour"),
    [(0, 0, "cpu"), (1, 0, "cpu"), (2, 0, "cuda"), (8, 0, "cuda"), (2, 9, "cpu")],
)
def test_the_flavour_follows_the_gpus(
    gpus: int, status: int, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, gpus, status)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert bootstrap.detect_flavour() == flavour


def test_no_nvidia_driver_means_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.detect_flavour() == "cpu"


def test_a_second_bootstrap_does_nothing(tmp_path: Path) -> None:
    (tmp_path / ".vllm-spd-stamp").write_text(bootstrap.fingerprint("cpu"))
    arguments = [sys.executable, "scripts/bootstrap.py", "--venv", str(tmp_path), "--flavour", "cpu"]
    answer = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == answer.stderr == ""
    assert not (tmp_path / "bin").exists()


def test_other_inputs_need_a_new_install() -> None:
    assert bootstrap.fingerprint("cpu") != bootstrap.fingerprint("cuda")


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_an_unsuitable_python_is_named(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"^Python 3\.11 to 3\.14 is needed and this is .*: run `make PYTHON=.*`\.$"):
        bootstrap.require_python()


def test_make_without_python_says_so_in_one_sentence() -> None:
    answer = subprocess.run(["make", "install", "PYTHON="], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode != 0
    assert answer.stderr.splitlines()[0].startswith("No Python 3.11 to 3.14 found: install one")
