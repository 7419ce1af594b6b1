"""Where the bytes of one rank live on the drive: keys to extents, in files of its own."""

from __future__ import annotations

import difflib
import enum
import errno
import mmap
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from nvmeswap.errors import SwapClosedError, SwapSpaceError, SwapUsageError, SwapWriteError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.digest import CHUNK_NBYTES
from nvmeswap.io.engine import Direction, Engine, Lane
from nvmeswap.io.probe import FolderProbe
from nvmeswap.stats import StoreStats
from nvmeswap.store.manifest import Manifest, ManifestEntry, Striping, TensorSpec
from nvmeswap.store.own_lock import OwnLock
from nvmeswap.store.owner import MANIFEST_FILE, OwnedFolders
from nvmeswap.store.pieces import Pieces, check_part
from nvmeswap.store.request import StoreBatch, StoreRequest, must_precede
from nvmeswap.store.swapfile import SwapFile
from nvmeswap.store.written import WrittenRanges, bytes_of

__all__ = ["Checksum", "Store", "StoreBatch", "StoreRequest", "TensorSpec"]

# Extents begin at multiples of at least this, whatever the drive's own sectors are (it may be
# replaced by one with larger sectors, and memory pages have this size too).
_LEAST_ALIGNMENT_NBYTES = 4096
_FILE_NAMES = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.swp")


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
        store.read_many(["weight", "bias"], [memory, other], lane=Lane.DEMAND).wait()
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
    other drives, which share the bytes; `ephemeral`, whether files lose their names once they are
    open; `timeout_s`, for every wait.
    Raises: SwapPathError, SwapOwnerError, SwapConfigError when it is made; SwapClosedError by calls
    after `close`, SwapForkError by all in a forked child, before anything is touched.
    Blocking: `read` and `write` only for the order above. What takes space (`create_file`,
    `allocate`, `reserve`) blocks, and other threads' calls wait for it. Threads: all calls from any
    thread.
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
        ephemeral: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        paths = [nvme_path, *(drive.folder for drive in probe.drives[1:])]
        self._owner = OwnedFolders.claim(paths, run=run, rank=rank, world_size=world_size)
        self.folder = self._owner.folder
        self.alignment_nbytes = max(probe.offset_alignment_nbytes, _LEAST_ALIGNMENT_NBYTES)
        self._engine = engine
        self._probe = probe
        self._checksum = checksum
        self._ephemeral = ephemeral
        self.timeout_s = timeout_s
        striping = Striping.over(self._owner.folders, probe)
        self._manifest = Manifest(run, rank, world_size, striping=striping)
        self._files: dict[str, SwapFile] = {}
        self._lock = OwnLock()
        self._closed = False
        self._read_nbytes = self._write_nbytes = 0
        self._verified_nbytes = self._reserved_nbytes = 0
        self._reserve_s = 0.0

    # --- places ----------------------------------------------------------------------------------

    def create_file(self, name: str, specs: Mapping[str, TensorSpec]) -> None:
        """Makes the file `name` ("params.swp") with an extent for each key, in this order.

        Takes all its space now. Blocks for as long as the filesystem takes. Raises SwapSpaceError,
        SwapPathError, SwapWriteError; then nothing is left of it.
        """
        with self._lock():
            self._check_open()
            taken = specs.keys() & self._manifest.entries.keys()
            assert not taken, f"keys are unique over the store: {sorted(taken)}"
            sizes = [padded_nbytes(spec.nbytes, self.alignment_nbytes) for spec in specs.values()]
            file = self._create(name, sum(sizes))
            self._add_entries(file, specs)
            try:
                self._save_manifest()
            except BaseException:
                for key in specs:
                    del self._manifest.entries[key]
                del self._files[name]
                file.remove()
                raise

    def allocate_many(self, name: str, specs: Mapping[str, TensorSpec]) -> list[int]:
        """Adds keys to the file `name`, which is made or grown where needed; freed space is used
        first, and in fresh space the keys are neighbours in this order. Returns where each lies.
        Raises SwapSpaceError, SwapWriteError, SwapPathError with everything as it was. The manifest
        on disk follows when the file grows: a rewrite costs more than moving a small tensor."""
        with self._lock():
            self._check_open()
            taken = specs.keys() & self._manifest.entries.keys()
            assert not taken, f"keys are unique over the store: {sorted(taken)}"
            file = self._files.get(name) or self._create(name, 0)
            nbytes_before = file.nbytes
            self._add_entries(file, specs)
            if file.nbytes != nbytes_before:
                try:
                    self._save_manifest()
                except BaseException:
                    for key in specs:
                        self._remove_entry(key)
                    raise
            return [self._manifest.entries[key].extent.offset_bytes for key in specs]

    def reserve(self, name: str, nbytes: int) -> None:
        """Makes the file `name` at least `nbytes` large, and fills what that adds with zeros: then
        the first write of a key is as fast as any later one, where storage that gives out its space
        late makes it half as fast. Blocks for about as long as writing `nbytes` takes; `stats` tell
        how long that was. Raises SwapSpaceError, SwapWriteError, SwapTimeoutError, SwapPathError
        with the file as large as it was."""
        with self._lock():
            self._check_open()
            begin_s = time.monotonic()
            file = self._files.get(name) or self._create(name, 0)
            self._reserved_nbytes += file.reserve(nbytes, timeout_s=self.timeout_s)
            self._reserve_s += time.monotonic() - begin_s
            self._save_manifest()

    def free(self, key: str) -> None:
        """Forgets the key; its space can be allocated again. Waits for its requests in flight."""
        self._when_still(key, self._remove_entry)

    def forget_bytes(self, key: str) -> None:
        """The key was never written: for one that is written anew in parts. Waits, as `free`."""
        self._when_still(key, lambda key: self._entry(key).written.remove_all())

    def _when_still(self, key: str, change: Callable[[str], None]) -> None:
        while True:
            with self._lock():
                self._check_open()
                in_flight = self._entry(key).in_flight
                if not in_flight:
                    change(key)
                    return
            for request in in_flight:
                request.settle()

    def free_those_of(self, keys: Iterable[str]) -> None:
        """Frees those of these keys that exist; nothing has been read or written there."""
        with self._lock():
            for key in self._manifest.entries.keys() & set(keys):
                self._remove_entry(key)

    def spec(self, key: str) -> TensorSpec:
        """What is stored under the key. Raises SwapUsageError, naming the nearest known key."""
        return self._entry(key).spec

    def path(self, key: str) -> Path:
        """The file that holds the key. Raises SwapUsageError for an unknown one."""
        return self.folder / self._entry(key).file

    def mapped(self, key: str, *, is_private: bool) -> tuple[mmap.mmap, int]:
        """`SwapFile.map` of the key's file, and where in it the key begins."""
        with self._lock():
            entry = self._entry(key)
            return self._files[entry.file].map(is_private=is_private), entry.extent.offset_bytes

    # --- bytes -----------------------------------------------------------------------------------

    def write(
        self, key: str, memory: torch.Tensor, *, lane: Lane, first_byte: int = 0
    ) -> StoreRequest:
        """Starts to write the bytes of `memory` (contiguous, CPU, any dtype) to the key's bytes
        from `first_byte` on. The memory must stay unchanged until the request is done.

        `first_byte` is a multiple of `alignment_nbytes`; so is the end, unless it is the key's end.
        A write that fails leaves its bytes as if never written.
        """
        return self._submit(Direction.WRITE, [key], [memory], lane, first_byte)[0]

    def read(
        self, key: str, memory: torch.Tensor, *, lane: Lane, first_byte: int = 0
    ) -> StoreRequest:
        """Starts to read the key's bytes from `first_byte` (a multiple of `alignment_nbytes`) on
        into all of `memory` (contiguous, CPU, any dtype).

        Raises SwapUsageError if any of these bytes was never written, or its last write failed.
        """
        return self._submit(Direction.READ, [key], [memory], lane, first_byte)[0]

    def write_many(
        self, keys: Sequence[str], memories: Sequence[torch.Tensor], *, lane: Lane
    ) -> StoreBatch:
        """Starts to write all of each key, as `write` does, at little more than the cost of moving
        the bytes. Keys are of one file, in any order, each once; a key whose write fails leaves the
        others good."""
        requests = self._submit(Direction.WRITE, keys, memories, lane)
        return StoreBatch(keys, requests, timeout_s=self.timeout_s)

    def read_many(
        self, keys: Sequence[str], memories: Sequence[torch.Tensor], *, lane: Lane
    ) -> StoreBatch:
        """Starts to read all of each key, as `read` does. Keys are of one file, in any order; one
        that was never written is a SwapUsageError before anything is read."""
        requests = self._submit(Direction.READ, keys, memories, lane)
        return StoreBatch(keys, requests, timeout_s=self.timeout_s)

    def in_flight(self, keys: Iterable[str]) -> list[StoreRequest]:
        """What is under way on those of these keys that exist."""
        with self._lock():
            known = self._manifest.entries
            return [each for key in known.keys() & set(keys) for each in known[key].in_flight]

    def stats(self) -> StoreStats:
        """A consistent snapshot; a request counts once it is known to be done."""
        with self._lock():
            return StoreStats(
                allocated_nbytes=sum(file.nbytes for file in self._files.values()),
                read_nbytes=self._read_nbytes,
                write_nbytes=self._write_nbytes,
                verified_nbytes=self._verified_nbytes,
                reserved_nbytes=self._reserved_nbytes,
                reserve_s=self._reserve_s,
            )

    def close(self, *, remove: bool = True) -> None:
        """Waits for requests in flight, then closes the files and removes the folder; calling again
        does nothing. With `remove` False the files and an up-to-date manifest stay for inspection,
        until the next start below `nvme_path`. In a forked child it does nothing. Raises
        SwapTimeoutError with the files still open: call it again."""
        if not self._lock.is_own_process():
            return
        with self._lock():
            self._closed = True
        for request in self.in_flight(self._manifest.entries):
            request.settle()
        with self._lock():
            files, self._files = self._files, {}
        for file in files.values():
            file.close()
        if files and not remove:
            self._save_manifest()
        self._owner.release(remove=remove)

    # --- inside ----------------------------------------------------------------------------------

    def _submit(
        self,
        direction: Direction,
        keys: Sequence[str],
        memories: Sequence[torch.Tensor],
        lane: Lane,
        first_byte: int | None = None,
    ) -> list[StoreRequest]:
        """Starts to move whole keys, or, with `first_byte`, a part of one."""
        while True:
            with self._lock():
                self._check_open()
                pieces = self._pieces(direction, keys, memories, first_byte)
                before = must_precede(direction, pieces)
                if not before:
                    requests = self._start(direction, pieces, lane)
                    break
            for each in before:
                each.settle()
        if direction is Direction.WRITE and self._checksum is Checksum.ALL:
            for request in requests:
                request.compute_digests()  # while they are in flight
        return requests

    def _pieces(
        self,
        direction: Direction,
        keys: Sequence[str],
        memories: Sequence[torch.Tensor],
        first_byte: int | None,
    ) -> Pieces:
        """What is to be moved, in the order of the file; empty keys are left out of a batch."""
        known = self._manifest.entries
        try:
            entries = [known[key] for key in keys]
        except KeyError as unknown:
            raise self._unknown_error(unknown.args[0]) from None
        sizes = [memory.nbytes for memory in memories]
        whole = sizes == [entry.written.nbytes for entry in entries]
        if first_byte is None:
            assert whole and len(sizes) == len(keys), f"wrong sizes: {sizes}"
            assert len({entry.file for entry in entries}) <= 1, "keys of several files"
        else:
            end_byte = first_byte + sizes[0]
            check_part(direction, keys[0], entries[0], first_byte, end_byte, self.alignment_nbytes)
        begin = first_byte or 0
        offsets = [entry.extent.offset_bytes + begin for entry in entries]
        pieces = Pieces(
            self.folder / entries[0].file if entries else self.folder,
            whole, begin, range(len(keys)), keys, entries, offsets, memories, sizes,
        )
        order = sorted(pieces.indices, key=offsets.__getitem__)
        if first_byte is None and 0 in sizes:
            order = [index for index in order if sizes[index]]
        return pieces if order == list(pieces.indices) else pieces.take(order)

    def _start(self, direction: Direction, pieces: Pieces, lane: Lane) -> list[StoreRequest]:
        parts = list(pieces.for_requests())
        # Also without checksums: what was never written must not be read.
        sums = [part.wanted_sums() if direction is Direction.READ else None for part in parts]
        verifies = self._checksum is Checksum.ALL
        requests: list[StoreRequest] = []
        for part, wanted in zip(parts, sums, strict=True):
            request = StoreRequest(direction, part, wanted if verifies else None, keeper=self)
            requests.append(request)
            try:
                part.attach(request)
                if direction is Direction.WRITE:
                    part.note_writing()
                self._start_transfers(request, lane)
            except BaseException:
                request.abandon()
                for each in requests:
                    each.settle()
                raise
        return requests

    def _start_transfers(self, request: StoreRequest, lane: Lane) -> None:
        pieces = request.pieces
        file = self._files[pieces.entries[0].file].file
        move = self._engine.read_many
        if request.direction is Direction.WRITE:
            move = self._engine.write_many
        if request.nbytes > CHUNK_NBYTES:
            offset_bytes = pieces.offsets_bytes[0]
            for chunk in bytes_of(pieces.memories[0]).split(CHUNK_NBYTES):
                request.transfers.append(move(file, [offset_bytes], [chunk], lane=lane))
                offset_bytes += chunk.nbytes
        elif request.nbytes:
            transfer = move(file, pieces.offsets_bytes, pieces.memories, lane=lane)
            request.transfers.append(transfer)

    def note_settled(self, request: StoreRequest, failed: Collection[int]) -> None:
        """For request.py."""
        pieces, digests = request.pieces, None
        is_sound = len(failed) < len(pieces.keys)  # of memory that could not be moved, no sums
        if request.direction is Direction.WRITE and self._checksum is Checksum.ALL and is_sound:
            digests = request.compute_digests()
        with self._lock():
            if request.settled:
                return  # another waiter was faster
            # Where Ctrl-C cuts it short the next one does the rest. While the request is attached
            # nothing newer has begun: only then may it be noted twice what it wrote.
            if not request.noted:
                moved_nbytes = request.nbytes - sum(pieces.sizes_nbytes[piece] for piece in failed)
                if request.direction is Direction.READ:
                    self._read_nbytes += moved_nbytes
                else:
                    pieces.note_written(digests, failed)
                    self._write_nbytes += moved_nbytes
                request.noted = True
            pieces.detach(request)
            request.settled = True

    def note_verified(self, nbytes: int) -> None:
        with self._lock():
            self._verified_nbytes += nbytes

    def _create(self, name: str, nbytes: int) -> SwapFile:
        assert _FILE_NAMES.fullmatch(name) and name not in self._files, name
        file = SwapFile(
            self.folder / name, nbytes, self._engine, self._probe, self.alignment_nbytes,
            ephemeral=self._ephemeral,
        )
        self._files[name] = file
        return file

    def _add_entries(self, file: SwapFile, specs: Mapping[str, TensorSpec]) -> None:
        extents = file.allocate([spec.nbytes for spec in specs.values()])
        for (key, spec), extent in zip(specs.items(), extents, strict=True):
            self._manifest.entries[key] = ManifestEntry(
                file.path.name, spec, extent, WrittenRanges(spec.nbytes)
            )

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
            raise self._unknown_error(key)
        return entry

    def _unknown_error(self, key: str) -> SwapUsageError:
        nearest = difflib.get_close_matches(key, self._manifest.entries, n=1, cutoff=0.0)
        return SwapUsageError(
            f'nothing is stored under "{key}"',
            path=self.folder,
            fix=f'the nearest known key is "{nearest[0]}"' if nearest else None,
        )
