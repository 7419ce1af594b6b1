"""The transformers job as a person types it: whole and by LoRA, from a config and a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("peft")

from nvmeswap.examples.finetune_hf import parse  # noqa: E402  # skipped where it can't be imported
from nvmeswap.examples.hf_model import load_text  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["[unknown]", "a", "model", "larger", "than", "memory"]
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RUN_EACH = """
import sys
from nvmeswap.examples.finetune_hf import leave, main
leave(max(main(arguments.split("|")) for arguments in sys.argv[1:]))
"""  # in one process: most of the time goes into its imports


def finetune(folder: Path, *runs: list[str]) -> subprocess.CompletedProcess[str]:
    common = ["--path", ".", "--steps", "2", "--batch-size", "2", "--sequence-length", "16"]
    return subprocess.run(
        [sys.executable, "-c", RUN_EACH, *("|".join([*common, *options]) for options in runs)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=240,
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json for tokens that are bytes."""
    path = tmp_path / "config.json"
    transformers.LlamaConfig(vocab_size=257, **TINY).to_json_file(path)
    return path


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A folder with weights, and a tokenizer that knows six words."""
    folder = tmp_path / "pretrained"
    config = transformers.Qwen2Config(vocab_size=len(WORDS), tie_word_embeddings=True, **TINY)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=WORDS[0]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_each_way_to_fine_tune_equals_the_run_in_ram(
    tmp_path: Path, config: Path, pretrained: Path
) -> None:
    """Promise one, for models as transformers and PEFT build them.  field cases E05, N03, N04"""
    (tmp_path / "text").write_text("a model larger than memory " * 20)
    result = finetune(
        tmp_path,
        ["--model", str(config), "--check", "--json", "whole.json"],
        ["--model", str(pretrained), "--text", "text", "--check"],
        ["--model", str(pretrained), "--text", "text", "--lora", "--check", "--json", "lora.json",
         "--precision", "bf16", "--gradient-checkpointing"],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("loss equals in-RAM run: yes") == 3
    whole = json.loads((tmp_path / "whole.json").read_text())
    lora = json.loads((tmp_path / "lora.json").read_text())
    assert whole["equals_in_ram_run"] and lora["equals_in_ram_run"]
    assert whole["figures"]["read_nbytes"] > 0
    assert len(whole["losses"]) == len(lora["losses"]) == 2


def test_text_is_in_the_tokens_of_the_model(tmp_path: Path, pretrained: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a larger model than ours")
    assert load_text(file, pretrained).tokens.tolist() == [1, 3, 2, 4, 0]
    assert load_text(file, None).tokens.tolist() == list(file.read_bytes())


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--path", "missing"], "--path missing"),
        (["--path", ".", "--model", "missing"], "--model missing"),
        (["--path", ".", "--text", "missing"], "--text missing"),
        (["--path", ".", "--model", "config.json"], "knows 200 tokens"),
    ],
)
def test_job_when_options_conflict_names_the_culprit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    culprit: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.LlamaConfig(vocab_size=200, **TINY).to_json_file("config.json")
    with pytest.raises(SystemExit) as stopped:
        parse(options)
    assert stopped.value.code == 2
    assert culprit in capsys.readouterr().err.splitlines()[-1]
