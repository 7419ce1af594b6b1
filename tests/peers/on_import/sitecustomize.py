"""Put first on PYTHONPATH: whoever imports DeepSpeed, in whichever process, gets ours.

NVMESWAP_PEER_CALL names the function of nvmeswap.deepspeed that is called then, and each process
that did so leaves a file with its id in the folder NVMESWAP_PEER_MARKS.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _CallAfter(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import nvmeswap.deepspeed

        getattr(nvmeswap.deepspeed, os.environ["NVMESWAP_PEER_CALL"])()
        Path(os.environ["NVMESWAP_PEER_MARKS"], str(os.getpid())).touch()


class _DeepSpeedFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "deepspeed":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallAfter(spec.loader)
        return spec


sys.meta_path.insert(0, _DeepSpeedFinder())
