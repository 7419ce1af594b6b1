"""A transformers model to fine-tune, and text in its tokens. Nothing is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from nvmeswap.examples.text import TOKEN_COUNT, Text

LORA_RANK = 8


def model_config(path: Path | None) -> Any:
    """That of a config.json or of the folder it is in; by default a Llama of 3 M parameters whose
    tokens are bytes."""
    if path is not None:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    return LlamaConfig(
        vocab_size=TOKEN_COUNT,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def weights_of(path: Path | None) -> Path | None:
    """The folder, if it has safetensors."""
    return path if path is not None and any(path.glob("*.safetensors")) else None


def build_model(
    path: Path | None, *, lora: bool, bf16: bool, gradient_checkpointing: bool, seed: int
) -> nn.Module:
    """The model in host memory, with the folder's weights or the seed's random ones.

    In fp32, as the optimizer's master values are to be; with `lora` only the adapters, which are
    all that is trained: a frozen base is stored and read in the precision it computes in.
    """
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if lora and bf16 else torch.float32
    folder = weights_of(path)
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    else:
        model = AutoModelForCausalLM.from_config(model_config(path), dtype=dtype)
    return _to_be_trained(model, lora=lora, gradient_checkpointing=gradient_checkpointing)


def sketch_model(path: Path, *, gradient_checkpointing: bool) -> nn.Module:
    """The same on the meta device, for weights that are read when it is sharded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(path), dtype=torch.float32)
    return _to_be_trained(model, lora=False, gradient_checkpointing=gradient_checkpointing)


def _to_be_trained(model: Any, *, lora: bool, gradient_checkpointing: bool) -> nn.Module:
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        adapters = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    trained: nn.Module = model.train()
    return trained


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """What the model's authors say is not to be split: its decoder layers."""
    kept_whole = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    return (module for module in model.modules() if type(module).__name__ in kept_whole)


def load_text(file: Path | None, model: Path | None) -> Text:
    """The file, or the standard library's sources, as tokens of the model's tokenizer; as bytes if
    it brings none."""
    text = Text.load(file)
    tokenizer = model / "tokenizer.json" if model is not None else None
    if tokenizer is None or not tokenizer.is_file():
        return text
    content = text.tokens[text.tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")
    encoding = Tokenizer.from_file(str(tokenizer)).encode(content, add_special_tokens=False)
    return Text(np.array(encoding.ids, dtype=np.int32))
