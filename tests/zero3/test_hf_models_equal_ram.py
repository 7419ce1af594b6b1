"""Models as transformers and PEFT build them: training from NVMe equals training in RAM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from nvmeswap.examples.reference import shard_in_ram
from tests.oracle import Run, first_difference

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY = 61
LEARNING_RATE = 1e-2
LEAST_NBYTES = 1000  # all adapters and norms are below, all other weights are not
STEPS = 2
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small models only wait for a second one."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def text(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def pictures(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 3, (2,), generator=generator),
    }


def tied_llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def gpt2() -> nn.Module:
    """Its Conv1D keeps weights the other way round; its dropout is on."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
    ))


def t5() -> nn.Module:
    """Encoder, decoder and head share one embedding."""
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    ))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=3,
    ))


def lora() -> nn.Module:
    """A frozen base, in bf16, under fp32 adapters."""
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, adapters)


@dataclass(frozen=True)
class Case:
    """A model, the class of its blocks, what it learns from, and how."""

    build: Callable[[], nn.Module]
    block: str
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]] = text
    bf16: bool = False
    checkpointing: bool = False

    def model(self) -> Any:
        torch.manual_seed(0)
        model: Any = self.build()
        if self.checkpointing:
            options = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return model


def swapped(
    model: nn.Module, nvme_path: Path, *, bf16: bool = False, optimizer: str = "nvme"
) -> tuple[Any, Any]:
    place = {"nvme_path": str(nvme_path), "buffer_count": 2}
    return nvmeswap.zero3.shard(model, {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 5000,
            "offload_param": {**place, "device": "nvme", "max_in_cpu": 0},
            "offload_optimizer": {**place, "device": optimizer},
        },
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "nvmeswap": {"min_swap_nbytes": LEAST_NBYTES},
    })


def in_ram(case: Case) -> tuple[Any, Any]:
    model = case.model()
    blocks = [module for module in model.modules() if type(module).__name__ == case.block]
    assert blocks
    return shard_in_ram(
        model, blocks, init_device_mesh("cpu", (1,)),
        bf16=case.bf16, learning_rate=LEARNING_RATE, weight_decay=1e-2,
    )


def clip(model: nn.Module, optimizer: Any) -> float:
    if hasattr(optimizer, "clip_grad_norm_"):
        return float(optimizer.clip_grad_norm_(0.5))
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())


def full(value: Any) -> torch.Tensor:
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def train(model: Any, optimizer: Any, case: Case) -> Run:
    """Steps with an evaluation and, if the model can, generation between them."""
    generator = torch.Generator().manual_seed(1)
    numbers: list[float] = []
    for step in range(STEPS):
        batch = case.batch(generator)
        torch.manual_seed(step)  # dropout
        model.train()
        loss = model(**batch).loss
        loss.backward()
        numbers += [loss.item(), clip(model, optimizer)]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            numbers.append(model(**batch).loss.item())
        if "input_ids" in batch:
            prompt = batch["input_ids"]
            tokens = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2,
                pad_token_id=0,
            )
            numbers += tokens.flatten().tolist()
    return Run(numbers, {name: full(value) for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    "case",
    [
        Case(tied_llama, "LlamaDecoderLayer", checkpointing=True, bf16=True),
        Case(mixtral, "MixtralDecoderLayer"),
        Case(gpt2, "GPT2Block", bf16=True),
        Case(t5, "T5Block"),
        Case(vit, "ViTLayer", batch=pictures),
        Case(lora, "LlamaDecoderLayer", checkpointing=True, bf16=True),
    ],
    ids=lambda case: case.build.__name__,
)
def test_model_from_nvme_equals_ram(one_rank: None, tmp_path: Path, case: Case) -> None:
    """All parameters on disk; buffers stay; train, evaluate and generate take turns.
    field cases D01, E05, N01, N02, N03"""
    model, optimizer = swapped(case.model(), tmp_path, bf16=case.bf16)
    try:
        ours = train(model, optimizer, case)
    finally:
        optimizer.close()
    assert first_difference(ours, train(*in_ram(case), case)) is None


def test_frozen_base_of_adapters_is_never_written(one_rank: None, tmp_path: Path) -> None:
    """It has no gradient and no state, and reading the adapters reads nothing of it.
    field cases N04, N05"""
    model, optimizer = swapped(lora(), tmp_path, optimizer="cpu")
    (path,) = tmp_path.rglob("params.swp")

    def base() -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def read_nbytes() -> int:
        engine = optimizer.swap.stats().engine
        return engine.read_direct_nbytes + engine.read_buffered_nbytes

    def adapters() -> dict[str, torch.Tensor]:
        return {name: full(v) for name, v in model.state_dict().items() if "lora_" in name}

    on_nvme = [p for p in model.parameters() if p.nbytes >= LEAST_NBYTES]
    assert on_nvme and not any(p.requires_grad for p in on_nvme)
    assert optimizer.swap.stats().params.nvme_nbytes == sum(p.nbytes for p in on_nvme)
    assert all(p.requires_grad for p in optimizer.param_groups[0]["params"])
    before = base()
    first = adapters()
    for _ in range(2):
        model(**text(torch.Generator().manual_seed(1))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    assert read_nbytes() > 0
    read_before = read_nbytes()
    last = adapters()
    assert read_nbytes() == read_before
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert base() == before
    optimizer.close()


def test_saving_a_model_writes_real_weights_or_raises(one_rank: None, tmp_path: Path) -> None:
    """The library's own call sees placeholders; with gathered values it writes all of them, tied
    and nested ones too.  field cases E07, F08"""
    nvme_path, folder = tmp_path / "nvme", tmp_path / "saved"
    nvme_path.mkdir()
    model, optimizer = swapped(tied_llama(), nvme_path)
    with pytest.raises(SwapUsageError, match="state_dict="):
        model.save_pretrained(folder)
    assert not folder.exists()
    model(**text(torch.Generator().manual_seed(1))).loss.backward()
    optimizer.step()
    weights = {name: full(value) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=dict(weights))
    optimizer.close()
    back = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_saved_adapters_are_real(one_rank: None, tmp_path: Path) -> None:
    """field cases E07, F08, N05"""
    nvme_path, folder = tmp_path / "nvme", tmp_path / "saved"
    nvme_path.mkdir()
    model, optimizer = swapped(lora(), nvme_path)
    with pytest.raises(SwapUsageError, match="state_dict="):
        model.save_pretrained(folder)
    model(**text(torch.Generator().manual_seed(1))).loss.backward()
    optimizer.step()
    weights = {name: full(v) for name, v in model.state_dict().items() if "lora_" in name}
    model.save_pretrained(folder, state_dict=dict(weights))
    optimizer.close()
    back = peft.PeftModel.from_pretrained(lora().unload(), folder).state_dict()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_scalar_parameter_is_refused_by_name(one_rank: None, tmp_path: Path) -> None:
    """CLIP's temperature is one: FSDP2 can't shard it, and the model stays as it was."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("logit_scale", nn.Parameter(torch.ones(())))
    with pytest.raises(SwapUsageError, match=r"logit_scale.*\n.*reshape\(1\)"):
        swapped(model, tmp_path)
    assert type(model) is nn.Sequential
