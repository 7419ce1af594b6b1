"""What is stored under which key, in memory and as manifest.json.

    {"format": 1, "run": "a1", "rank": 0, "world_size": 2,
     "entries": {"layer.0.weight": {"file": "params.swp", "dtype": "bfloat16", "shape": [8, 4],
        "stride": [4, 1], "offset_bytes": 0, "nbytes": 64, "padded_nbytes": 4096, "generation": 3,
        "written": [[0, 64, "9c5a..."]]}}}

`written` lists [first byte, end byte, xxh3_64 in hexadecimal or null]. A reader must refuse another
format number; it may ignore fields it does not know. The file is replaced by an atomic rename.
Format 2 is that of files that are striped over several drives: offsets are those of all together,
and there is one more field, which says how they share them (native/stripe.h):

    "striping": {"stripe_nbytes": 1048576, "weights": [3, 2],
                 "folders": ["/a/nvmeswap/a1/rank00000", "/b/nvmeswap/a1/rank00000"]}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nvmeswap.errors import SwapManifestError
from nvmeswap.io.file import STRIPE_NBYTES
from nvmeswap.io.probe import FolderProbe
from nvmeswap.store.extents import Extent
from nvmeswap.store.written import WrittenRanges

if TYPE_CHECKING:
    from nvmeswap.store.request import StoreRequest

FORMAT = 1
STRIPED_FORMAT = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, apart from its values. `stride` is remembered for who rebuilds it; the
    stored bytes are always the dense elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Striping:
    """How every file of a store is shared by drives: the files of the same name in `folders`."""

    stripe_nbytes: int
    weights: tuple[int, ...]
    folders: tuple[str, ...]

    @classmethod
    def over(cls, folders: Sequence[Path], probe: FolderProbe) -> Striping | None:
        """None for one drive, where nothing is striped."""
        if len(folders) == 1:
            return None
        weights = tuple(drive.weight for drive in probe.drives)
        return cls(STRIPE_NBYTES, weights, tuple(map(str, folders)))


@dataclass(slots=True)
class ManifestEntry:
    """One key: where its bytes are, how often they were written, and the sums known for them.
    `in_flight` are the requests under way on it; they are not saved."""

    file: str
    spec: TensorSpec
    extent: Extent
    written: WrittenRanges
    generation: int = 0
    in_flight: tuple[StoreRequest, ...] = ()


@dataclass(slots=True)
class Manifest:
    """All keys of one rank's folder. Does no locking: its owner does."""

    run: str
    rank: int
    world_size: int
    entries: dict[str, ManifestEntry] = field(default_factory=dict)
    striping: Striping | None = None

    def check(self, key: str, spec: TensorSpec) -> None:
        """Raises SwapManifestError, naming the first field that differs, if `key` holds something
        else than `spec` ("key" when it holds nothing)."""
        entry = self.entries.get(key)
        if entry is None:
            raise SwapManifestError(f'nothing is stored under "{key}"', field="key")
        for name in ("dtype", "shape", "stride"):
            _compare(f'"{key}"', name, getattr(entry.spec, name), getattr(spec, name))

    def check_header(self, *, run: str, rank: int, world_size: int) -> None:
        """Raises SwapManifestError, naming the field, if this is another run's or rank's."""
        _compare("the manifest", "world_size", self.world_size, world_size)
        _compare("the manifest", "rank", self.rank, rank)
        _compare("the manifest", "run", self.run, run)

    def save(self, path: Path) -> None:
        """Writes the file beside `path`, for its owner's eyes only, then renames it over; blocks.
        Raises OSError."""
        content: dict[str, Any] = {
            "format": FORMAT if self.striping is None else STRIPED_FORMAT,
            "run": self.run,
            "rank": self.rank,
            "world_size": self.world_size,
            "entries": {key: _entry_to_json(entry) for key, entry in self.entries.items()},
        }
        if self.striping is not None:
            content["striping"] = asdict(self.striping)
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)  # an interrupted save's, or a link: never written through
        with open(partial, "x", opener=_open_private) as file:
            file.write(json.dumps(content))  # json.dump would take the slow encoder
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Reads what `save` wrote; blocks. Raises SwapManifestError (field "format") for anything
        else, and OSError."""
        try:
            with open(path, "rb", opener=_open_private) as file:
                content = json.load(file)
            striping = None
            if content["format"] == STRIPED_FORMAT:
                striping = _striping_from_json(content["striping"])
            else:
                _compare("the manifest", "format", content["format"], FORMAT)
            return cls(
                run=str(content["run"]),
                rank=int(content["rank"]),
                world_size=int(content["world_size"]),
                entries={k: _entry_from_json(entry) for k, entry in content["entries"].items()},
                striping=striping,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SwapManifestError(
                f"not a manifest ({type(error).__name__}: {error})", field="format", path=path
            ) from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _compare(whose: str, field_name: str, stored: object, asked: object) -> None:
    if stored != asked:
        raise SwapManifestError(
            f"{whose}: {field_name} differs: stored {stored}, asked for {asked}",
            field=field_name,
            fix="read it as it was written, or store it anew",
        )


def _entry_to_json(entry: ManifestEntry) -> dict[str, Any]:
    return {
        "file": entry.file,
        "dtype": str(entry.spec.dtype).removeprefix("torch."),
        "shape": list(entry.spec.shape),
        "stride": list(entry.spec.stride),
        "offset_bytes": entry.extent.offset_bytes,
        "nbytes": entry.extent.nbytes,
        "padded_nbytes": entry.extent.padded_nbytes,
        "generation": entry.generation,
        "written": [
            [first_byte, end_byte, None if digest is None else f"{digest:016x}"]
            for first_byte, end_byte, digest in entry.written.ranges
        ],
    }


def _striping_from_json(content: dict[str, Any]) -> Striping:
    return Striping(
        int(content["stripe_nbytes"]), tuple(content["weights"]), tuple(content["folders"])
    )


def _entry_from_json(content: dict[str, Any]) -> ManifestEntry:
    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content['dtype']} is not a dtype")
    return ManifestEntry(
        file=content["file"],
        spec=TensorSpec(dtype, tuple(content["shape"]), tuple(content["stride"])),
        extent=Extent(content["offset_bytes"], content["nbytes"], content["padded_nbytes"]),
        written=WrittenRanges(
            content["nbytes"],
            [
                (first_byte, end_byte, None if digest is None else int(digest, 16))
                for first_byte, end_byte, digest in content["written"]
            ],
        ),
        generation=content["generation"],
    )
