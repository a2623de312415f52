"""Packaging. `kernels/` is installed as `vllm_spd.kernels`: at the top level it would hide the Hugging Face package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["vllm_spd", "vllm_spd.*"]), "vllm_spd.kernels"],
    package_dir={"vllm_spd.kernels": "kernels"},
)
