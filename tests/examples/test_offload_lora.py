"""Fine-tuning beside an offloaded base, as a person types it: from host memory and from NVMe."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("peft")

from nvmeswap.examples.offload_lora import main, parse  # noqa: E402  # skipped where it can't be

TINY = ["--steps", "2", "--batch-size", "2", "--sequence-length", "16"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    ).to_json_file(path)
    return path


@pytest.mark.parametrize("on_nvme", [False, True])
def test_run_equals_the_resident_one_and_adapters_are_saved(
    on_nvme: bool, tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise one, for adapters beside a base that comes a block at a time.  field case A08"""
    place = ["--path", str(tmp_path), "--bf16"] if on_nvme else []
    saved = tmp_path / "adapters"
    assert main([*TINY, *place, "--model", str(config), "--save", str(saved), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "at most 2 of 7 units" in shown
    assert shown.splitlines()[-1] == "equals resident run: yes"
    adapters = safetensors.load_file(saved / "adapter_model.safetensors")
    assert adapters and all("lora_" in name for name in adapters)
    assert any(each.any() for name, each in adapters.items() if "lora_B" in name)  # zeros at first


@pytest.mark.parametrize(
    ("options", "culprit"),
    [(["--path", "missing"], "--path missing"), (["--model", "missing"], "--model missing")],
)
def test_job_when_options_conflict_names_the_culprit(
    options: list[str], culprit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(options)
    assert stopped.value.code == 2
    assert culprit in capsys.readouterr().err.splitlines()[-1]
