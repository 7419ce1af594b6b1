"""Real text as tokens, and the batches drawn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

END_OF_FILE = 256
TOKEN_COUNT = 257  # the bytes, and END_OF_FILE
MOST_TEXT_NBYTES = 4 << 20  # arbitrary: plenty for a demonstration, read in a blink


class Text:
    """A run of tokens. A batch depends on its four coordinates and on nothing else, so that two
    runs, or a run and its repetition in RAM, see the same data."""

    def __init__(self, tokens: npt.NDArray[np.signedinteger[Any]]) -> None:
        self.tokens = tokens

    @classmethod
    def load(cls, path: Path | None) -> Text:
        """The file's bytes; by default the sources of Python's standard library, as installed."""
        if path is not None:
            return cls(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int16))
        pieces: list[npt.NDArray[np.int16]] = []
        left_nbytes = MOST_TEXT_NBYTES
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            content = source.read_bytes()[:left_nbytes]
            left_nbytes -= len(content)
            pieces.append(np.frombuffer(content, dtype=np.uint8).astype(np.int16))
            pieces.append(np.array([END_OF_FILE], dtype=np.int16))
            if not left_nbytes:
                break
        return cls(np.concatenate(pieces))

    def batch(
        self, batch_size: int, length: int, *, seed: int, step: int, micro_batch: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, `(batch_size, length)` each; a target is the input's next token."""
        random = np.random.default_rng([seed, step, micro_batch, rank])
        starts = random.integers(0, len(self.tokens) - length, size=batch_size)
        rows = np.stack([self.tokens[start : start + length + 1] for start in starts])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]
