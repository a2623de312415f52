"""Model folders for tests: tiny, random, float32, so that greedy text can be compared token for token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from examples.smollm2 import prepare

__all__ = ["TINY_VOCAB", "tiny_adapter", "tiny_llama", "tiny_tokenizer"]

TINY_VOCAB = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING = ("<think>", "</think>")
"""The last ids of the vocabulary."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(path: Path, layers: int = 8, hidden: int = 64, max_len: int = 2048, seed: int = 0) -> Path:
    """Write a random float32 Llama with its own byte-level tokenizer (vocabulary 512) into `path` and return it.

    The weights are drawn wide (0.2 rather than 0.02): a narrow random model repeats one token for ever, and a drafter
    that is right by accident proves nothing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=max_len,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(path)
    tiny_tokenizer(path)
    return path


def tiny_adapter(path: Path, model: Path, seed: int) -> Path:
    """Write a random LoRA adapter for a `tiny_llama` folder, strong enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width, inner, rank = config["hidden_size"], config["intermediate_size"], 4
    shapes = {"self_attn.q_proj": (width, width), "self_attn.o_proj": (width, width), "mlp.down_proj": (width, inner)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(rank, columns, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=generator)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in shapes]
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**adapter, "target_modules": modules}))
    return path


def tiny_tokenizer(path: Path) -> None:
    """Byte-level BPE without merges: 256 bytes, special and thinking tokens and fillers: every token id has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"w{index}" for index in range(TINY_VOCAB - len(SPECIAL) - len(THINKING) - len(alphabet))]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet, *fillers, *THINKING])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINKING])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


def shortened_smollm2(path: Path, max_len: int) -> Path:
    """SmolLM2 with a smaller `max_position_embeddings`, for tests at the end of the context; weights are linked."""
    source = prepare()
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    shutil.copy(source / "config.json", path / "config.json")
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = max_len
    (path / "config.json").write_text(json.dumps(config))
    return path
