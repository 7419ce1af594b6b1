"""A batch does what its single calls would: same bytes, same order, same errors, key by key."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap.errors import (
    SwapCancelledError,
    SwapChecksumError,
    SwapReadError,
    SwapSpaceError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.io.engine import Lane
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Checksum, Store

MIB = 1 << 20
COUNT = 24


def flat(numel: int, dtype: torch.dtype = torch.uint8) -> TensorSpec:
    return TensorSpec(dtype, (numel,), (1,))


def values(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def poisoned(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def read_back(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    memories = [poisoned(store.spec(key).nbytes) for key in keys]
    store.read_many(keys, memories, lane=Lane.DEMAND).wait()
    return dict(zip(keys, memories, strict=True))


def apart(store: Store) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Keys with three others between each two, so that each is a block of its own."""
    store.create_file("params.swp", {str(number): flat(4096) for number in range(4 * COUNT)})
    keys = [str(number) for number in range(0, 4 * COUNT, 4)]
    return keys, {key: values(4096, seed=int(key)) for key in keys}


@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=12),
    calls=st.lists(
        st.tuples(st.sampled_from(["write", "read", "write one", "read one", "write part"]),
                  st.lists(st.integers(0, 11), min_size=1, max_size=12)),
        max_size=12,
    ),
)
def test_batches_and_single_calls_without_waiting_equal_memory(
    workshop: Any, guarded: Any, tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int], calls: list[tuple[str, list[int]]],
) -> None:
    """A read that overtakes a write of one of its keys returns last step's weights."""
    # field cases A01, A02
    store = workshop.store(tmp_path_factory.mktemp("store"))
    store.create_file("params.swp", {str(key): flat(nbytes) for key, nbytes in enumerate(sizes)})
    expected = [values(nbytes, seed=key) for key, nbytes in enumerate(sizes)]
    names = [str(key) for key in range(len(sizes))]
    pending: list[Any] = [store.write_many(names, list(expected), lane=Lane.WRITEBACK)]
    reads = []
    for seed, (call, numbers) in enumerate(calls):
        keys = [number % len(sizes) for number in numbers]
        if "one" in call or "part" in call:
            keys = keys[:1]
        if call.startswith("write"):
            keys = list(dict.fromkeys(keys))
            sources = [values(sizes[key], seed=100 + 20 * seed + key) for key in keys]
            if call == "write part":
                first = 4096 if sizes[keys[0]] > 4096 else 0
                end = min(first + 8192, sizes[keys[0]])
                pending.append(store.write(str(keys[0]), sources[0][first:end],
                                           lane=Lane.WRITEBACK, first_byte=first))
                whole = expected[keys[0]].clone()
                whole[first:end] = sources[0][first:end]
                sources = [whole]
            elif call == "write":
                pending.append(
                    store.write_many([str(key) for key in keys], sources, lane=Lane.WRITEBACK)
                )
            else:
                pending.append(store.write(str(keys[0]), sources[0], lane=Lane.DEMAND))
            for key, source in zip(keys, sources, strict=True):
                expected[key] = source
        else:
            targets = [guarded(sizes[key]) for key in keys]
            memories = [target.memory for target in targets]
            if call == "read":
                request = store.read_many([str(key) for key in keys], memories, lane=Lane.DEMAND)
            else:
                request = store.read(str(keys[0]), memories[0], lane=Lane.PREFETCH)
            reads.append((request, targets, [expected[key] for key in keys]))
    for request, targets, wanted in reads:
        request.wait()
        for target, each in zip(targets, wanted, strict=True):
            assert torch.equal(target.memory, each) and target.intact()
    for request in pending:
        request.wait()
        assert request.done()
    for key, memory in read_back(store, names).items():
        assert torch.equal(memory, expected[int(key)])
    store.close()


def test_batch_of_many_sizes_and_dtypes_verifies_each_byte_once(
    workshop: Any, tmp_path: Path
) -> None:
    """Pieces of one request, requests of one batch, transfers of one large piece: all are cut."""
    store = workshop.store(tmp_path)
    specs = {f"small.{n}": flat(1 + n, torch.bfloat16) for n in range(700)}
    specs |= {"large": flat(20 * MIB + 77), "just": flat(8 * MIB), "over": flat(8 * MIB + 1)}
    specs |= {f"medium.{n}": flat(MIB + n) for n in range(20)}
    store.create_file("params.swp", specs)
    sources = {key: values(spec.nbytes, seed=n) for n, (key, spec) in enumerate(specs.items())}
    keys = sorted(specs, key=lambda key: key[::-1])
    store.write_many(keys, [sources[key] for key in keys], lane=Lane.WRITEBACK).wait()
    for key, memory in read_back(store, keys[::-1]).items():
        assert torch.equal(memory, sources[key]), key
    nbytes = sum(spec.nbytes for spec in specs.values())
    stats = store.stats()
    assert (stats.write_nbytes, stats.read_nbytes, stats.verified_nbytes) == (nbytes,) * 3


def test_batch_of_neighbours_takes_few_blocks(workshop: Any, tmp_path: Path) -> None:
    """Small tensors moved one by one reach a fifth of the drive's speed."""
    store = workshop.store(tmp_path)
    specs = {str(number): flat(4096) for number in range(2048)}
    store.create_file("params.swp", specs)
    keys = sorted(specs, key=lambda key: int(key) * 7919 % 2048)
    store.write_many(keys, [values(4096)] * len(keys), lane=Lane.WRITEBACK).wait()
    read_back(store, keys)
    stats = workshop.engines[0].stats()
    assert stats.request_count == 2 * 2048 / 256
    assert stats.block_count <= 2 * 2048 / 64


@pytest.mark.parametrize(("number", "code", "kind"),
                         [(1, 5, SwapReadError), (7, 61, SwapReadError), (COUNT, 5, SwapReadError)])
def test_read_batch_when_a_block_fails_loses_its_key_only(
    workshop: Any, tmp_path: Path, number: int, code: int, kind: type[SwapReadError]
) -> None:
    """One bad sector must not cost the whole model, nor be blamed on another tensor."""
    store = workshop.store(tmp_path, fault_script=f"read {number} errno {code}")
    keys, sources = apart(store)
    store.write_many(keys, list(sources.values()), lane=Lane.WRITEBACK).wait()
    memories = [poisoned(4096) for _ in keys]
    batch = store.read_many(keys[::-1], memories, lane=Lane.DEMAND)
    failures = batch.failed()
    (index,) = failures
    assert index == COUNT - number  # blocks go in the order of the file
    with pytest.raises(kind) as raised:
        batch.wait()
    assert f'"{keys[number - 1]}"' in raised.value.what and raised.value.errno == code
    for place, (key, memory) in enumerate(zip(keys[::-1], memories, strict=True)):
        assert place == index or torch.equal(memory, sources[key])
    assert all(torch.equal(memory, sources[key]) for key, memory in read_back(store, keys).items())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("code", "kind"), [(5, SwapWriteError), (28, SwapSpaceError)])
def test_write_batch_when_blocks_fail_loses_their_keys_only(
    workshop: Any, tmp_path: Path, waits: bool, code: int, kind: type[SwapWriteError]
) -> None:
    """The failed keys hold half old, half new bytes: a read must not return them."""
    # field case K01
    numbers = (2, 5, 6, 9, 10, 11, 12, 13)
    script = "; ".join(f"write {COUNT + number} errno {code}" for number in numbers)
    store = workshop.store(tmp_path, fault_script=script)
    keys, sources = apart(store)
    store.write_many(keys, [values(4096)] * COUNT, lane=Lane.WRITEBACK).wait()
    batch = store.write_many(keys, list(sources.values()), lane=Lane.WRITEBACK)
    lost = [keys[number - 1] for number in numbers]
    if waits:
        with pytest.raises(kind) as raised:
            batch.wait()
        assert f'"{lost[0]}"' in raised.value.what
        for key in lost[1:6]:
            assert f'"{key}"' in (raised.value.cause or "")
        assert "2 more" in (raised.value.cause or "")
    good = [key for key in keys if key not in lost]
    assert all(torch.equal(memory, sources[key]) for key, memory in read_back(store, good).items())
    for key in lost:
        with pytest.raises(SwapUsageError, match=f'"{key}"'):
            read_back(store, [key])
    assert list(batch.failed()) == [keys.index(key) for key in lost]
    store.write_many(lost, [sources[key] for key in lost], lane=Lane.WRITEBACK).wait()
    assert all(torch.equal(memory, sources[key]) for key, memory in read_back(store, keys).items())


def test_read_batch_when_bits_flip_names_the_keys(workshop: Any, tmp_path: Path) -> None:
    """A failing drive's wrong bit becomes a wrong model, unnoticed."""
    store = workshop.store(tmp_path, fault_script="read 3 flip; read 8 flip")
    keys, sources = apart(store)
    store.write_many(keys, list(sources.values()), lane=Lane.WRITEBACK).wait()
    with pytest.raises(SwapChecksumError) as raised:
        read_back(store, keys)
    assert f'"{keys[2]}"' in raised.value.what and f'"{keys[7]}"' in (raised.value.cause or "")
    assert raised.value.offset_bytes == 2 * 4 * 4096
    assert store.stats().verified_nbytes == (COUNT - 2) * 4096
    assert all(torch.equal(memory, sources[key]) for key, memory in read_back(store, keys).items())


@pytest.mark.parametrize("block", [1, 9, 20])
def test_large_read_when_a_bit_flips_anywhere_is_an_error(
    workshop: Any, tmp_path: Path, block: int
) -> None:
    """Sums are compared chunk by chunk, while later chunks are read: none may be left out."""
    store = workshop.store(tmp_path, fault_script=f"read {block} flip")
    nbytes = 19 * MIB + 4096
    store.create_file("params.swp", {"small": flat(100), "large": flat(nbytes)})
    source = values(nbytes)
    store.write_many(["large", "small"], [source, values(100)], lane=Lane.WRITEBACK).wait()
    memory = poisoned(nbytes)
    request = store.read("large", memory, lane=Lane.DEMAND)
    for _ in range(2):
        with pytest.raises(SwapChecksumError, match="large"):
            request.wait()
    assert torch.equal(read_back(store, ["large"])["large"], source)


def test_large_read_of_bytes_written_in_parts_verifies_each_part(
    workshop: Any, tmp_path: Path
) -> None:
    """The parts' sums begin between the chunks of the read."""
    store = workshop.store(tmp_path)
    nbytes = 21 * MIB
    store.create_file("params.swp", {"large": flat(nbytes)})
    source = values(nbytes)
    cuts = [0, 3 * MIB + 4096, 12 * MIB, 12 * MIB + 8192, nbytes]
    for first, end in itertools.pairwise(cuts):
        store.write("large", source[first:end], lane=Lane.WRITEBACK, first_byte=first).wait()
    assert torch.equal(read_back(store, ["large"])["large"], source)
    assert store.stats().verified_nbytes == nbytes
    with store.path("large").open("r+b") as file:
        file.seek(12 * MIB + 5000)
        file.write(b"vandal")
    with pytest.raises(SwapChecksumError) as raised:
        read_back(store, ["large"])
    assert raised.value.offset_bytes == 12 * MIB


def test_read_batch_with_a_key_never_written_reads_nothing(workshop: Any, tmp_path: Path) -> None:
    """An extent's zeros, or the last user's values, would pass for weights."""
    store = workshop.store(tmp_path)
    keys, sources = apart(store)
    store.write_many(keys[1:], list(sources.values())[1:], lane=Lane.WRITEBACK).wait()
    memories = [poisoned(4096) for _ in keys]
    with pytest.raises(SwapUsageError, match=f'"{keys[0]}"'):
        store.read_many(keys[::-1], memories, lane=Lane.DEMAND)
    with pytest.raises(SwapUsageError, match="no such"):
        store.read_many([*keys[1:], "no such"], memories, lane=Lane.DEMAND)
    assert all(bool((memory == 0xA5).all()) for memory in memories)
    assert store.stats().read_nbytes == 0


def test_batch_with_a_memory_of_another_size_is_our_bug(workshop: Any, tmp_path: Path) -> None:
    """A memory too large overwrites the next tensor in the file."""
    store = workshop.store(tmp_path)
    keys, sources = apart(store)
    memories = [*list(sources.values())[1:], values(4097)]
    with pytest.raises(AssertionError):
        store.write_many(keys, memories, lane=Lane.DEMAND)
    store.write_many(keys, list(sources.values()), lane=Lane.DEMAND).wait()


def test_batch_when_checksums_are_off_verifies_nothing(workshop: Any, tmp_path: Path) -> None:
    """The switch must switch: sums cost CPU time."""
    store = workshop.store(tmp_path, checksum=Checksum.OFF, fault_script="read 2 flip")
    keys, sources = apart(store)
    store.write_many(keys, list(sources.values()), lane=Lane.WRITEBACK).wait()
    wrong = [key for key, memory in read_back(store, keys).items()
             if not torch.equal(memory, sources[key])]
    assert wrong == [keys[1]] and store.stats().verified_nbytes == 0


def test_read_that_nobody_needs_is_cancelled(workshop: Any, tmp_path: Path) -> None:
    """Reads of discarded tensors would hold up those that are needed."""
    store = workshop.store(tmp_path, fault_script="read 1000000 errno 5")
    engine = workshop.engines[0]
    specs = {"large": flat(80 * MIB), "other": flat(4096), "small": flat(4096)}
    store.create_file("params.swp", specs)
    sources = {key: values(spec.nbytes) for key, spec in specs.items()}
    store.write_many(list(specs), list(sources.values()), lane=Lane.WRITEBACK).wait()
    engine.inject("read * never")
    large = store.read("large", poisoned(80 * MIB), lane=Lane.PREFETCH)
    both = store.read_many(["other", "small"], [poisoned(4096)] * 2, lane=Lane.PREFETCH)
    large.drop()
    both.requests[0].drop()  # by one of its two
    engine.inject("read 1000000 errno 5")
    assert both.failed() == {}
    with pytest.raises(SwapCancelledError, match="large"):
        large.wait()
    assert engine.stats().read_direct_nbytes < 80 * MIB
    for key, memory in read_back(store, list(specs)).items():
        assert torch.equal(memory, sources[key])


def test_keys_when_freed_with_a_batch_in_flight_wait_for_it(workshop: Any, tmp_path: Path) -> None:
    """The late write would land in the next tensor's place."""
    store = workshop.store(tmp_path, fault_script="write 1 delay 100")
    specs = {str(number): flat(4096) for number in range(8)}
    store.allocate_many("tensors.swp", specs)
    store.write_many(list(specs), [values(4096, seed=1)] * 8, lane=Lane.WRITEBACK)
    for key in specs:
        store.free(key)
    store.allocate_many("tensors.swp", specs)
    store.write_many(list(specs), [values(4096, seed=2)] * 8, lane=Lane.WRITEBACK)
    wanted = values(4096, seed=2)
    assert all(torch.equal(memory, wanted) for memory in read_back(store, list(specs)).values())
