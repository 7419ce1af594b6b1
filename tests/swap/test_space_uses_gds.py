"""`use_gds` is served where it works, and costs one warning where it does not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from nvmeswap import SwappedAdamW
from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapConfigError
from nvmeswap.swap.tensors import TensorSwapper
from tests.io.fake_gds.programs import Programs

SWAP = """
import warnings
from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.swap.space import Placement, SwapSpace
access = os.access
os.access = lambda path, mode: True if path == "/run/udev" else access(path, mode)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    space = SwapSpace(Placement((folder,), "run"), {}, swap=SwapBlock(),
                      aio=AioConfig(use_gds=True), pin_memory=False, moves_gpu_tensors=True)
told = [each for each in told if "use_gds" in str(each.message)]
assert [each.category for each in told] == [RuntimeWarning] * len(told)
print(space.uses_gds, space.engine.backend == "gds", len(told), *(each.message for each in told))
space.close()
"""


def test_space_takes_the_backend_where_cufile_works(fakes: Programs, tmp_path: Path) -> None:
    assert fakes.run(SWAP, tmp_path).split() == ["True", "True", "0"]


def test_space_takes_the_usual_backend_where_cufile_refuses(
    fakes: Programs, tmp_path: Path
) -> None:
    """Else every save fails, each with its own error.  field case G02"""
    told = fakes.run(SWAP, tmp_path, cufile="handle=5030").split(maxsplit=3)
    assert told[:3] == ["False", "False", "1"] and "5030" in told[3]


def test_setting_that_can_have_no_effect_is_told(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(5000))
    with pytest.warns(RuntimeWarning, match="use_gds"):
        SwappedAdamW([parameter], nvme_path=tmp_path, aio=AioConfig(use_gds=True)).close()
    with pytest.raises(SwapConfigError, match="backend"):
        TensorSwapper(tmp_path, aio=AioConfig(use_gds=True), swap=SwapBlock(backend="posix"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it may work here")
def test_run_without_cufile_goes_on_with_one_warning(tmp_path: Path) -> None:
    """field cases G02, G04"""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        swapper = TensorSwapper(tmp_path, aio=AioConfig(use_gds=True), swap=SwapBlock())
    assert [each.category for each in told if "use_gds" in str(each.message)] == [RuntimeWarning]
    with swapper:
        tensor = torch.randn(100_001)
        swapper.swap_out("a", tensor)
        assert torch.equal(swapper.swap_in("a"), tensor)
