"""Where the bytes of one rank live on the drive: keys to extents, in files of its own."""

from __future__ import annotations

import difflib
import enum
import errno
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from nvmeswap.errors import SwapClosedError, SwapSpaceError, SwapUsageError, SwapWriteError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.engine import Direction, Engine, Lane
from nvmeswap.io.probe import FolderProbe
from nvmeswap.stats import StoreStats
from nvmeswap.store.manifest import Manifest, ManifestEntry, Striping, TensorSpec
from nvmeswap.store.owner import MANIFEST_FILE, OwnedFolders
from nvmeswap.store.request import Place, StoreRequest
from nvmeswap.store.swapfile import SwapFile
from nvmeswap.store.written import WrittenRange, digest_of

__all__ = ["Checksum", "Store", "StoreRequest", "TensorSpec"]

# Extents begin at multiples of at least this, whatever the drive's own sectors are (it may be
# replaced by one with larger sectors, and memory pages have this size too).
_LEAST_ALIGNMENT_NBYTES = 4096
_FILE_NAMES = re.compile(r"[A-Za-z0-9_-]+\.swp")


class Checksum(enum.Enum):
    """Which reads are compared with what was written."""

    OFF = "off"
    ALL = "all"


class Store:
    """Named tensors in .swp files of a folder that belongs to this rank alone.

        store = Store(path, run="a1", rank=0, world_size=1, engine=engine, probe=probe)
        store.create_file("params.swp", {"weight": TensorSpec(torch.float32, (8, 4), (4, 1))})
        store.write("weight", memory, lane=Lane.WRITEBACK).wait()
        store.read("weight", memory, lane=Lane.DEMAND).wait()
        store.close()

    Order: reads and writes of the same bytes of a key take effect in the order of the calls. For
    that a read first waits for the writes in flight that it overlaps, and a write for the reads and
    writes; other calls go out at once.
    Checksums: every write's sum is kept. A later write replaces the sums of what it covers; of what
    it covers in part, the rest is no longer verified. A read is compared with every sum that lies
    wholly inside it. Sums are computed in the caller's thread: for a write while it is in flight,
    for a read in `wait`.

    Args: `nvme_path`, an existing folder; `run`, `rank`, `world_size`, who we are; `engine`,
    shared, closed by its owner after the store; `probe`, of `nvme_path`, or of it and folders on
    other drives, which share the bytes; `timeout_s`, for every wait.
    Raises: SwapPathError, SwapOwnerError, SwapConfigError when it is made; SwapClosedError by calls
    after `close`.
    Blocking: `read` and `write` only for the order above. Threads: all calls from any thread.
    Ownership: the store owns folder and files and removes them; memory stays the caller's.
    What it is not: a checkpoint. No other run ever reads these files.
    """

    def __init__(
        self,
        nvme_path: Path,
        *,
        run: str,
        rank: int,
        world_size: int,
        engine: Engine,
        probe: FolderProbe,
        checksum: Checksum = Checksum.ALL,
        timeout_s: float = 60.0,
    ) -> None:
        self._owner = OwnedFolders.claim(
            [nvme_path, *(drive.folder for drive in probe.drives[1:])],
            run=run, rank=rank, world_size=world_size,
        )
        self.folder = self._owner.folder
        self.alignment_nbytes = max(probe.offset_alignment_nbytes, _LEAST_ALIGNMENT_NBYTES)
        self._engine = engine
        self._probe = probe
        self._checksum = checksum
        self._timeout_s = timeout_s
        self._manifest = Manifest(
            run=run, rank=rank, world_size=world_size,
            striping=Striping.over(self._owner.folders, probe),
        )
        self._files: dict[str, SwapFile] = {}
        self._in_flight: dict[str, list[StoreRequest]] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._read_nbytes = 0
        self._write_nbytes = 0
        self._verified_nbytes = 0

    # --- places ----------------------------------------------------------------------------------

    def create_file(self, name: str, specs: Mapping[str, TensorSpec]) -> None:
        """Makes the file `name` ("params.swp") with an extent for each key, in this order.

        Takes all its space now. Blocks for as long as the filesystem takes. Raises SwapSpaceError,
        SwapPathError, SwapWriteError; then nothing is left of it.
        """
        with self._lock:
            self._check_open()
            taken = specs.keys() & self._manifest.entries.keys()
            assert not taken, f"keys are unique over the store: {sorted(taken)}"
            file_nbytes = sum(
                padded_nbytes(spec.nbytes, self.alignment_nbytes) for spec in specs.values()
            )
            file = self._create(name, file_nbytes)
            for key, spec in specs.items():
                self._add_entry(file, key, spec)
            try:
                self._save_manifest()
            except BaseException:
                for key in specs:
                    del self._manifest.entries[key]
                del self._files[name]
                file.remove()
                raise

    def allocate(self, name: str, key: str, spec: TensorSpec) -> None:
        """Adds one key to the file `name`, which is made or grown where needed; freed space is used
        first. Raises SwapSpaceError, SwapWriteError, SwapPathError with everything as it was. The
        manifest on disk follows when the file grows: rewriting it for each key would cost more than
        moving a small tensor."""
        with self._lock:
            self._check_open()
            assert key not in self._manifest.entries, f"keys are unique over the store: {key}"
            file = self._files.get(name) or self._create(name, 0)
            nbytes_before = file.nbytes
            self._add_entry(file, key, spec)
            if file.nbytes != nbytes_before:
                try:
                    self._save_manifest()
                except BaseException:
                    self._remove_entry(key)
                    raise

    def free(self, key: str) -> None:
        """Forgets the key; its space can be allocated again. Waits for its requests in flight."""
        while True:
            with self._lock:
                self._check_open()
                self._entry(key)
                in_flight = list(self._in_flight.get(key, ()))
                if not in_flight:
                    self._remove_entry(key)
                    return
            for request in in_flight:
                request.settle()

    def spec(self, key: str) -> TensorSpec:
        """What is stored under the key. Raises SwapUsageError, naming the nearest known key."""
        with self._lock:
            return self._entry(key).spec

    def path(self, key: str) -> Path:
        """The file that holds the key. Raises SwapUsageError for an unknown one."""
        with self._lock:
            return self.folder / self._entry(key).file

    # --- bytes -----------------------------------------------------------------------------------

    def write(
        self, key: str, memory: torch.Tensor, *, lane: Lane, first_byte: int = 0
    ) -> StoreRequest:
        """Starts to write the bytes of `memory` (contiguous, CPU, any dtype) to the key's bytes
        from `first_byte` on. The memory must stay unchanged until the request is done.

        `first_byte` is a multiple of `alignment_nbytes`; so is the end, unless it is the key's end.
        A write that fails leaves its bytes as if never written.
        """
        source = _bytes_of(memory)
        request, written = self._submit(key, source, Direction.WRITE, lane, first_byte)
        if self._checksum is Checksum.ALL:
            for each in written:
                each.digest = digest_of(source)
        return request

    def read(
        self, key: str, memory: torch.Tensor, *, lane: Lane, first_byte: int = 0
    ) -> StoreRequest:
        """Starts to read the key's bytes from `first_byte` (a multiple of `alignment_nbytes`) on
        into all of `memory` (contiguous, CPU, any dtype).

        Raises SwapUsageError if any of these bytes was never written, or its last write failed.
        """
        request, _ = self._submit(key, _bytes_of(memory), Direction.READ, lane, first_byte)
        return request

    def stats(self) -> StoreStats:
        """A consistent snapshot; a request counts once it is known to be done."""
        with self._lock:
            return StoreStats(
                allocated_nbytes=sum(file.nbytes for file in self._files.values()),
                read_nbytes=self._read_nbytes,
                write_nbytes=self._write_nbytes,
                verified_nbytes=self._verified_nbytes,
            )

    def close(self, *, remove: bool = True) -> None:
        """Waits for requests in flight, then closes the files and removes the folder; calling again
        does nothing. With `remove` False the files and an up-to-date manifest stay for inspection,
        until the next start below `nvme_path`. Raises SwapTimeoutError with the files still open:
        call it again."""
        with self._lock:
            self._closed = True
            in_flight = [each for requests in self._in_flight.values() for each in requests]
        for request in in_flight:
            request.settle()
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()
        if files and not remove:
            self._save_manifest()
        self._owner.release(remove=remove)

    # --- inside ----------------------------------------------------------------------------------

    def _submit(
        self, key: str, memory: torch.Tensor, direction: Direction, lane: Lane, first_byte: int
    ) -> tuple[StoreRequest, tuple[WrittenRange, ...]]:
        while True:
            with self._lock:
                self._check_open()
                entry = self._entry(key)
                place = self._place(key, entry, first_byte, first_byte + memory.numel())
                # What is done is settled too: that is what notices a failure nobody waited for.
                before = [
                    each
                    for each in self._in_flight.get(key, ())
                    if each.done() or _must_precede(each, direction, place)
                ]
                if not before:
                    return self._start(entry, place, memory, direction, lane)
            for each in before:
                each.settle()

    def _start(
        self,
        entry: ManifestEntry,
        place: Place,
        memory: torch.Tensor,
        direction: Direction,
        lane: Lane,
    ) -> tuple[StoreRequest, tuple[WrittenRange, ...]]:
        file = self._files[entry.file].file
        offset_bytes = place.offset_bytes + place.first_byte
        transfer = None
        expected: tuple[WrittenRange, ...] = ()
        written: tuple[WrittenRange, ...] = ()
        if direction is Direction.READ:
            self._check_written(entry, place)
            if memory.numel():
                transfer = self._engine.read(file, offset_bytes, memory, lane=lane)
            expected = entry.written.inside(place.first_byte, place.end_byte)
        else:
            # The engine pads a direct write with zeros, which must not reach valid bytes.
            ends_whole = place.end_byte % self.alignment_nbytes == 0
            assert ends_whole or place.end_byte == entry.extent.nbytes, f"{place.key}: ends midway"
            if memory.numel():
                transfer = self._engine.write(file, offset_bytes, memory, lane=lane)
                written = (entry.written.add(place.first_byte, place.end_byte),)
            entry.generation += 1
        request = StoreRequest(
            transfer,
            direction,
            place,
            memory,
            expected,
            timeout_s=self._timeout_s,
            on_settled=self._note_settled,
            on_verified=self._note_verified,
        )
        self._in_flight.setdefault(place.key, []).append(request)
        return request, written

    def _note_settled(self, request: StoreRequest, succeeded: bool) -> None:
        place = request.place
        with self._lock:
            in_flight = self._in_flight.get(place.key, [])
            if request not in in_flight:
                return  # another waiter was faster
            in_flight.remove(request)
            if not in_flight:
                del self._in_flight[place.key]
            if request.direction is Direction.READ:
                self._read_nbytes += request.nbytes if succeeded else 0
            elif succeeded:
                self._write_nbytes += request.nbytes
            else:
                written = self._manifest.entries[place.key].written
                written.remove(place.first_byte, place.end_byte)

    def _note_verified(self, nbytes: int) -> None:
        with self._lock:
            self._verified_nbytes += nbytes

    def _create(self, name: str, nbytes: int) -> SwapFile:
        assert _FILE_NAMES.fullmatch(name) and name not in self._files, name
        file = SwapFile(
            self.folder / name, nbytes, self._engine, self._probe, self.alignment_nbytes
        )
        self._files[name] = file
        return file

    def _add_entry(self, file: SwapFile, key: str, spec: TensorSpec) -> None:
        extent = file.allocate(spec.nbytes)
        self._manifest.entries[key] = ManifestEntry(file.path.name, spec, extent)

    def _remove_entry(self, key: str) -> None:
        entry = self._manifest.entries.pop(key)
        self._files[entry.file].extents.free(entry.extent)

    def _save_manifest(self) -> None:
        path = self.folder / MANIFEST_FILE
        try:
            self._manifest.save(path)
        except OSError as error:
            kind = SwapSpaceError if error.errno == errno.ENOSPC else SwapWriteError
            raise kind(
                "the manifest could not be written", path=path, errno=error.errno,
                fix='free space, or choose another "nvme_path"',
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise SwapClosedError("the store is closed", path=self.folder)

    def _entry(self, key: str) -> ManifestEntry:
        entry = self._manifest.entries.get(key)
        if entry is None:
            nearest = difflib.get_close_matches(key, self._manifest.entries, n=1, cutoff=0.0)
            raise SwapUsageError(
                f'nothing is stored under "{key}"',
                path=self.folder,
                fix=f'the nearest known key is "{nearest[0]}"' if nearest else None,
            )
        return entry

    def _place(self, key: str, entry: ManifestEntry, first_byte: int, end_byte: int) -> Place:
        extent = entry.extent
        assert 0 <= first_byte <= end_byte <= extent.nbytes, f"{key}: outside its extent"
        assert first_byte % self.alignment_nbytes == 0, f"{key}: begins between blocks"
        return Place(key, self.folder / entry.file, extent.offset_bytes, first_byte, end_byte)

    def _check_written(self, entry: ManifestEntry, place: Place) -> None:
        if not entry.written.covers(place.first_byte, place.end_byte):
            raise SwapUsageError(
                f'"{place.key}" was never written, or its last write failed',
                path=place.path,
                offset_bytes=place.offset_bytes + place.first_byte,
                wanted_nbytes=place.end_byte - place.first_byte,
                fix="write it before reading it",
            )


def _bytes_of(memory: torch.Tensor) -> torch.Tensor:
    assert memory.device.type == "cpu" and memory.is_contiguous()
    return memory.detach().view(-1).view(torch.uint8)


def _must_precede(earlier: StoreRequest, direction: Direction, place: Place) -> bool:
    reads_only = earlier.direction is Direction.READ and direction is Direction.READ
    return not reads_only and earlier.place.overlaps(place)
