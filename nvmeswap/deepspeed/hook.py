"""Importing this with NVMESWAP_DEEPSPEED=1 in the environment calls `install` as soon as the
process has imported DeepSpeed. For launchers whose command can't be changed: a file in
site-packages imports it (docs/howto/deepspeed.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAME = "deepspeed"


class _Finder(MetaPathFinder):
    """Finds DeepSpeed as the others find it, with a loader that installs afterwards. Being asked is
    not being imported: transformers and accelerate look whether there is one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Installing(spec.loader, self)
                return spec
        return None


class _Installing(Loader):
    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self._finder)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from nvmeswap.deepspeed.install import install

        install()


if os.environ.get("NVMESWAP_DEEPSPEED") == "1" and _NAME not in sys.modules:
    sys.meta_path.insert(0, _Finder())
