"""What was stored is what is asked for, or the first difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapManifestError
from nvmeswap.store.extents import Extent
from nvmeswap.store.manifest import Manifest, ManifestEntry, TensorSpec
from nvmeswap.store.written import WrittenRanges

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8,
          torch.bool, torch.complex64, torch.float8_e4m3fn]


def spec(dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = (4, 2),
         stride: tuple[int, ...] = (2, 1)) -> TensorSpec:
    return TensorSpec(dtype, shape, stride)


def manifest(**entries: TensorSpec) -> Manifest:
    made = Manifest(run="a", rank=1, world_size=2)
    for index, (key, each) in enumerate(entries.items()):
        extent = Extent(4096 * index, each.nbytes, 4096)
        made.entries[key] = ManifestEntry("params.swp", each, extent, WrittenRanges(each.nbytes))
    return made


@pytest.mark.parametrize(
    ("asked", "field"),
    [(spec(torch.float32), "dtype"), (spec(shape=(2, 4), stride=(4, 1)), "shape"),
     (spec(stride=(1, 4)), "stride")],
)
def test_check_when_a_field_differs_names_it(asked: TensorSpec, field: str) -> None:
    """fp16 bytes read as fp32: an abort on all ranks, or garbage."""
    # field case A04: right an error naming dtype, wrong a buffer of twice the size
    stored = manifest(weight=spec())
    stored.check("weight", spec())
    with pytest.raises(SwapManifestError) as caught:
        stored.check("weight", asked)
    assert caught.value.field == field


def test_check_when_the_key_is_missing_says_so() -> None:
    """A renamed layer must not be taken for an empty one."""
    with pytest.raises(SwapManifestError) as caught:
        manifest(weight=spec()).check("bias", spec())
    assert caught.value.field == "key"


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"world_size": 4}, "world_size"), ({"rank": 0}, "rank"), ({"run": "b"}, "run")],
)
def test_header_when_another_topology_asks_names_the_field(
    changed: dict[str, object], field: str
) -> None:
    """At another world size, reads of equal length return other shards' values."""
    # field cases A04, K06
    header = {"run": "a", "rank": 1, "world_size": 2}
    manifest().check_header(**header)  # type: ignore[arg-type]
    with pytest.raises(SwapManifestError) as caught:
        manifest().check_header(**(header | changed))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_manifest_when_saved_and_loaded_is_equal(tmp_path: Path) -> None:
    """Sums or dtypes that change on their way through JSON refuse good bytes."""
    specs = {str(dtype): spec(dtype) for dtype in DTYPES}
    specs |= {"scalar": spec(shape=(), stride=()), "empty": spec(shape=(0, 3), stride=(3, 1))}
    saved = manifest(**specs)
    entry = saved.entries["scalar"]
    entry.generation = 7
    entry.written.add(0, 1, 2**64 - 1)
    entry.written.add(1, 2, None)
    saved.save(tmp_path / "manifest.json")
    loaded = Manifest.load(tmp_path / "manifest.json")
    for key, each in specs.items():
        loaded.check(key, each)
        assert loaded.entries[key].extent == saved.entries[key].extent
    assert loaded.entries["scalar"].generation == 7
    assert loaded.entries["scalar"].written.ranges == [(0, 1, 2**64 - 1), (1, 2, None)]
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "run": "a"}',
             '{"format": 1, "run": "a", "rank": 0, "world_size": 1, "entries": {"k": {}}}',
             '{"format": 1, "run": "a", "rank": 0, "world_size": 1, "entries": {"k": '
             '{"dtype": "nn", "file": "f"}}}']
)
def test_manifest_when_not_ours_or_torn_is_refused(tmp_path: Path, text: str) -> None:
    """A torn or foreign file must not be taken for an empty manifest."""
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(SwapManifestError) as caught:
        Manifest.load(path)
    assert caught.value.field == "format"
