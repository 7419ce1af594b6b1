"""Models as transformers and PEFT build them, on one device: managed equals plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import SwapError
from tests.offload.conftest import Manage
from tests.offload.runs import assert_equal, twins, weights_of
from tests.oracle import Run

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
    ))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    ))


def lora() -> Any:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, adapters)


MODELS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (llama, mixtral, gpt2, t5, lora)
}
each_model = pytest.mark.parametrize("name", MODELS)
each_tier = pytest.mark.parametrize("tier", ["cpu", "nvme"])


def learn(model: Any, steps: int = 2) -> Run:
    numbers: dict[str, torch.Tensor] = {}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        words = torch.randint(3, VOCABULARY, (2, 9))
        outputs = model(input_ids=words, labels=words)
        outputs.loss.backward()
        numbers[f"loss {step}"] = outputs.loss.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    return Run([], numbers | weights_of(model))


def speak(model: Any) -> torch.Tensor:
    torch.manual_seed(0)
    words = torch.randint(3, VOCABULARY, (2, 4))
    said: torch.Tensor = model.eval().generate(
        input_ids=words, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    model.train()
    return said


@each_model
@each_tier
@pytest.mark.parametrize(
    "granularity, checkpointing", [("leaf", None), ("block", False), ("block", True)]
)
def test_training_and_generating_equal(
    manage: Manage, tier: str, name: str, granularity: str, checkpointing: bool | None
) -> None:
    """`checkpointing`: none, or whether it is the reentrant kind. features A18, A28; 3.2"""
    plain, model = twins(MODELS[name])
    if checkpointing is not None:
        options = {"use_reentrant": checkpointing}
        for each in (plain, model):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            each.enable_input_require_grads()
    manager = manage(
        model, tier=tier, granularity=granularity,
        trainable="resident" if name == "lora" else tier,
    )
    assert_equal(learn(model), learn(plain))
    assert manager.stats().resident_unit_count == 0
    assert torch.equal(speak(model), speak(plain))
    assert manager.stats().resident_unit_count == 0


@each_tier
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_model_saved_while_managed_is_real(
    manage: Manage, tmp_path: Path, tier: str, name: str
) -> None:
    """field case E07"""
    plain, model = twins(MODELS[name])
    manage(model, tier=tier, trainable=tier)
    learn(model), learn(plain)
    model.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved")
    assert torch.equal(speak(again), speak(plain))


@each_tier
def test_adapters_merged_while_managed(manage: Manage, tier: str) -> None:
    """field case C03"""
    plain, model = twins(lora)
    manager = manage(model, tier=tier, trainable="resident")
    learn(model), learn(plain)
    with manager.materialize():
        model.merge_adapter()
    plain.merge_adapter()
    assert torch.equal(speak(model), speak(plain))
    with manager.materialize():
        model.unmerge_adapter()
    plain.unmerge_adapter()
    assert_equal(learn(model), learn(plain))


@each_tier
def test_adapters_added_while_managed(manage: Manage, tier: str) -> None:
    """field case C04"""
    plain, model = (each.requires_grad_(False) for each in twins(llama))
    manage(model, tier=tier)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tuned: list[nn.Module] = []
    for each in (plain, model):
        torch.manual_seed(1)
        tuned.append(peft.get_peft_model(each, adapters))
    try:
        ours = learn(tuned[1])
    except SwapError as error:
        assert error.fix
    else:
        assert_equal(ours, learn(tuned[0]))
