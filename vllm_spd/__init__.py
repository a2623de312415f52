"""Speculative Pipeline Decoding (SPD) for vLLM."""
