"""Packaging. `kernels/` is installed as `vllm_spd.kernels`: at the top level it would hide the Hugging Face package."""

from pathlib import Path

from setuptools import find_packages, setup

KERNELS = {"vllm_spd.kernels": "kernels"} if (Path(__file__).parent / "kernels" / "__init__.py").exists() else {}

setup(packages=[*find_packages(include=["vllm_spd", "vllm_spd.*"]), *KERNELS], package_dir=KERNELS)
