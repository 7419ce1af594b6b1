"""Importing this with NVMESWAP_DEEPSPEED=1 in the environment calls `install` as soon as the
process has imported DeepSpeed. For launchers whose command can't be changed: a file
`nvmeswap.pth` in site-packages with the line `import nvmeswap.deepspeed.hook` imports it in every
Python, at no cost where the variable is not set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_NAME = "deepspeed"


class _Finder(MetaPathFinder):
    """Finds DeepSpeed once, as others find it, with a loader that installs afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Installing(spec.loader)
        return spec


class _Installing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from nvmeswap.deepspeed.install import install

        install()


if os.environ.get("NVMESWAP_DEEPSPEED") == "1" and _NAME not in sys.modules:
    sys.meta_path.insert(0, _Finder())
