"""`install` replaces all of what it names in DeepSpeed, or nothing, and `uninstall` puts it back.

In processes of their own: DeepSpeed is imported in each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOOK = """
import importlib
partitioning = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
stage3 = importlib.import_module("deepspeed.runtime.zero.stage3")
from deepspeed.ops.op_builder import AsyncIOBuilder
def look():
    return [
        partitioning.AsyncPartitionedParameterSwapper,
        stage3.PartitionedOptimizerSwapper, stage3.PipelinedOptimizerSwapper,
        partitioning.Init._ensure_availability_of_partitioned_params,
        stage3.DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out,
        stage3.DeepSpeedZeroOptimizer_Stage3.destroy,
        stage3.DeepSpeedZeroOptimizer_Stage3.zero_grad,
        AsyncIOBuilder._loaded_ops.get("async_io"),
    ]
"""


def run(
    script: str, *arguments: str, folder: Path, expected: int = 0, **environment: str
) -> str:
    path = folder / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, *arguments, str(path), "one", "--two=2"], text=True, capture_output=True,
        check=False, timeout=300,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH":
             os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **environment},
    )
    assert done.returncode == expected, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_all_is_replaced_and_put_back_and_what_lacks_a_part_is_refused(tmp_path: Path) -> None:
    run(LOOK + """
import nvmeswap.deepspeed
from nvmeswap.errors import SwapConfigError
before = look()
assert not nvmeswap.deepspeed.is_installed()
nvmeswap.deepspeed.install()
nvmeswap.deepspeed.install()
assert nvmeswap.deepspeed.is_installed()
assert all(new is not old for new, old in zip(look(), before))
nvmeswap.deepspeed.uninstall()
nvmeswap.deepspeed.uninstall()
assert look() == before

for swapper in (stage3.PipelinedOptimizerSwapper, partitioning.AsyncPartitionedParameterSwapper):
    name = "swap_in" if "Param" in swapper.__name__ else "release_swap_buffers"
    former = getattr(swapper, name)
    def other(self, another): pass
    setattr(swapper, name, other)
    try:
        nvmeswap.deepspeed.install()
    except SwapConfigError as error:
        assert f"{swapper.__name__}.{name}" in str(error) and "another" in str(error), error
        assert "0.19.8" in error.fix
    else:
        raise AssertionError("a DeepSpeed with another surface was taken")
    assert look() == before
    setattr(swapper, name, former)
nvmeswap.deepspeed.install()
""", folder=tmp_path)


def test_launcher_installs_and_passes_the_arguments_on(tmp_path: Path) -> None:
    script = """
import sys, nvmeswap.deepspeed
from pathlib import Path
assert __name__ == "__main__"
assert nvmeswap.deepspeed.is_installed()
assert sys.argv[1:] == [*sys.argv[1:-2], "one", "--two=2"], sys.argv
assert sys.path[0] == str(Path(__file__).parent), sys.path
print("argv", sys.argv[1:])
"""
    assert "argv ['one', '--two=2']" in run(script, "-m", "nvmeswap.deepspeed", folder=tmp_path)
    out = run(script, "-m", "nvmeswap.deepspeed", "--local_rank=3", folder=tmp_path)
    assert "argv ['--local_rank=3', 'one', '--two=2']" in out


def test_environment_variable_installs_once_deepspeed_is_imported(tmp_path: Path) -> None:
    script = """
import nvmeswap.deepspeed.hook
import importlib.util
import nvmeswap.deepspeed
assert importlib.util.find_spec("deepspeed") is not None  # as transformers does
assert not nvmeswap.deepspeed.is_installed()
import deepspeed
import os
assert nvmeswap.deepspeed.is_installed() == (os.environ["NVMESWAP_DEEPSPEED"] == "1")
"""
    run(script, folder=tmp_path, NVMESWAP_DEEPSPEED="1")
    run(script, folder=tmp_path, NVMESWAP_DEEPSPEED="0")
