"""Many tensors at once: what comes back is what went out, and a batch fails tensor by tensor."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap import TensorSwapper
from nvmeswap.errors import (
    SwapChecksumError,
    SwapManifestError,
    SwapUsageError,
    SwapWriteError,
)

KEYS = [f"key {number}" for number in range(8)]
MAKERS = {
    "fp32": lambda seed: filled((1024,), torch.float32, seed),
    "bf16 odd": lambda seed: filled((37, 41), torch.bfloat16, seed),
    "bytes": lambda seed: filled((70_001,), torch.uint8, seed),
    "scalar": lambda seed: filled((), torch.float64, seed),
    "empty": lambda seed: torch.empty(3, 0, 2),
    "column": lambda seed: filled((50, 1), torch.float32, seed),
    "channels last": lambda seed: filled((2, 3, 4, 5), torch.float32, seed).to(
        memory_format=torch.channels_last),
    "transposed": lambda seed: filled((60, 7), torch.float16, seed).t(),
    "gaps": lambda seed: filled((100, 10), torch.int64, seed)[::2, 1:5],
    "conjugate": lambda seed: filled((300,), torch.complex64, seed).conj(),
    "negative": lambda seed: filled((1,), torch.complex64, seed).conj().imag,
    "parameter": lambda seed: torch.nn.Parameter(filled((64, 16), torch.float32, seed)),
}


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(100).to(dtype)


def poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, requires_grad=False).fill_(1)


@pytest.fixture
def swapper(tmp_path: Path) -> Iterator[TensorSwapper]:
    with TensorSwapper(tmp_path) as made:
        yield made


def small(count: int, step: int = 0) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": filled((1024,), torch.float32, step + n) for n in range(count)}


@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["out", "out", "out tied", "in", "in out", "in some", "prefetch",
                             "discard", "one out", "one in"]),
            st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(sorted(MAKERS))),
                     min_size=1, max_size=8),
        ),
        max_size=14,
    )
)
def test_any_mix_of_batches_behaves_like_a_dict(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, list[tuple[str, str]]]]
) -> None:
    """No tensor may get another's bytes, whatever was rewritten, tied, prefetched or freed."""
    # field cases A01, A02, A09
    model: dict[str, torch.Tensor] = {}
    with TensorSwapper(tmp_path_factory.mktemp("dict")) as swapper:
        for step, (call, chosen) in enumerate(calls):
            known = [key for key, _ in chosen if key in model]  # may repeat
            tensors = {key: MAKERS[kind](step) for key, kind in chosen}
            if call == "out tied":
                tensors = dict.fromkeys(tensors, tensors[chosen[0][0]])
            if call.startswith("out"):
                swapper.swap_out_many(tensors)
                model |= {key: tensor.detach().clone() for key, tensor in tensors.items()}
            elif call == "one out":
                key = chosen[0][0]
                swapper.swap_out(key, tensors[key])
                model[key] = tensors[key].detach().clone()
            elif call == "one in":
                assert all(torch.equal(swapper.swap_in(key), model[key]) for key in known)
            elif call == "prefetch":
                swapper.prefetch(known)
            elif call == "discard":
                for key in dict.fromkeys(known):
                    swapper.discard(key)
                    del model[key]
            else:
                out = {key: poisoned_like(model[key]) for key in known}
                if call == "in some":
                    out = {key: out[key] for key in known[::2]}
                back = swapper.swap_in_many(known, out=None if call == "in" else out)
                assert list(back) == list(dict.fromkeys(known))
                assert all(torch.equal(back[key], model[key]) for key in known)
                assert all(back[key] is out[key] for key in out) or call == "in"
        back = swapper.swap_in_many(model)
        assert all(torch.equal(back[key], tensor) for key, tensor in model.items())
        assert all(back[key].dtype is tensor.dtype for key, tensor in model.items())
        assert sorted(swapper.keys()) == sorted(model)


def test_batch_into_views_never_touches_their_neighbours(swapper: TensorSwapper) -> None:
    """A padded read wrote past a caller's view elsewhere."""
    # field case A02
    tensors = {str(n): filled((1000 + n,), torch.int8, n) for n in range(40)}
    swapper.swap_out_many(tensors)
    wholes = {key: torch.full((2200,), -7, dtype=torch.int8) for key in tensors}
    views = {
        key: whole[7 : 7 + tensors[key].numel()] if int(key) % 2 else
        whole[:: 2][: tensors[key].numel()]
        for key, whole in wholes.items()
    }
    swapper.swap_in_many(reversed(tensors), out=views)
    for key, view in views.items():
        assert torch.equal(view, tensors[key])
        view.fill_(-7)
        assert bool((wholes[key] == -7).all())


def test_tensors_that_are_rewritten_keep_their_places(
    swapper: TensorSwapper, tmp_path: Path
) -> None:
    """Freeing and allocating thousands of places each step scatters them over the file."""
    step, following = small(64), small(64, 1000)
    swapper.swap_out_many(step)
    (path,) = tmp_path.rglob("*.swp")
    before = path.read_bytes()[: 64 * 4096]
    assert before == b"".join(tensor.numpy().tobytes() for tensor in step.values())
    shuffled = sorted(following, key=lambda key: key[::-1])
    swapper.swap_out_many({key: following[key] for key in shuffled})
    swapper.swap_out("layer.3", step["layer.3"])
    following["layer.3"] = step["layer.3"]
    after = path.read_bytes()[: 64 * 4096]
    assert after == b"".join(tensor.numpy().tobytes() for tensor in following.values())


def test_tied_tensors_stay_stored_once_over_many_steps(swapper: TensorSwapper) -> None:
    """Peers store a tied weight twice, or compute with half of it."""
    for step in range(5):
        weight = filled((1 << 14,), torch.float32, step)
        tensors = small(20, step) | {"embedding": weight, "head": weight.view(-1)}
        swapper.swap_out_many(tensors)
        assert swapper.stats().write_nbytes == (step + 1) * (20 * 4096 + (4 << 14))
        back = swapper.swap_in_many(tensors)
        assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())
        assert back["head"].data_ptr() != back["embedding"].data_ptr()
    swapper.discard("embedding")
    assert torch.equal(swapper.swap_in_many(["head"])["head"], weight)


def test_prefetched_batch_is_read_once(swapper: TensorSwapper) -> None:
    """Read twice, a prefetch costs time instead of hiding it."""
    tensors = small(1300)
    swapper.swap_out_many(tensors)
    swapper.prefetch(tensors)
    swapper.prefetch(list(tensors)[:10])
    assert torch.equal(swapper.swap_in("layer.5"), tensors["layer.5"])
    out = {key: poisoned_like(tensor) for key, tensor in tensors.items() if key != "layer.5"}
    back = swapper.swap_in_many(out, out=out)
    assert all(back[key] is out[key] and torch.equal(out[key], tensors[key]) for key in out)
    assert swapper.stats().read_nbytes == 1300 * 4096
    assert swapper.stats().verified_nbytes == 1300 * 4096


def test_discarding_what_is_being_prefetched_leaves_the_rest(swapper: TensorSwapper) -> None:
    """A late read would land in the next tensor's place; a cancelled one must cost nobody else."""
    tensors = {f"layer.{n}": filled((1 << 18,), torch.float32, n) for n in range(64)}
    swapper.swap_out_many(tensors)
    keys = list(tensors)
    swapper.prefetch(keys)
    for key in keys[:60]:
        swapper.discard(key)
    new = {f"new.{n}": filled((1 << 18,), torch.float32, 100 + n) for n in range(60)}
    swapper.swap_out_many(new)
    wanted = new | {key: tensors[key] for key in keys[60:]}
    back = swapper.swap_in_many(wanted)
    assert all(torch.equal(back[key], tensor) for key, tensor in wanted.items())
    swapper.prefetch(wanted)
    swapper.close()


def test_tensors_that_were_changed_on_disk_are_named(
    swapper: TensorSwapper, tmp_path: Path
) -> None:
    """One wrong tensor must not cost the others, nor pass unnoticed."""
    tensors = small(2200)
    swapper.swap_out_many(tensors)
    (path,) = tmp_path.rglob("*.swp")
    with path.open("r+b") as file:
        for number in (3, 2100):
            file.seek(number * 4096 + 77)
            file.write(b"vandal")
    out = {key: poisoned_like(tensor) for key, tensor in tensors.items()}
    with pytest.raises(SwapChecksumError, match=r"layer\.3") as raised:
        swapper.swap_in_many(tensors, out=out)
    assert "layer.2100" in (raised.value.cause or "")
    good = tensors.keys() - {"layer.3", "layer.2100"}
    assert all(torch.equal(out[key], tensors[key]) for key in good)
    swapper.prefetch(tensors)
    with pytest.raises(SwapChecksumError, match=r"layer\.2100"):
        swapper.swap_in("layer.2100")
    assert torch.equal(swapper.swap_in("layer.2099"), tensors["layer.2099"])
    with pytest.raises(SwapChecksumError, match=r"layer\.3"):
        swapper.swap_in_many(["layer.2099", "layer.3"])


def test_batch_that_gets_no_space_leaves_the_others(swapper: TensorSwapper) -> None:
    """A full disk must not cost what is stored already."""
    # field case K01: right an error before anything is written, wrong tensors cut short
    tensors = small(10)
    swapper.swap_out_many(tensors)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    written_nbytes = swapper.stats().write_nbytes
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, limits[1]))
        with pytest.raises(SwapWriteError):
            swapper.swap_out_many(
                tensors | {"large": torch.zeros(40 << 20), "new": torch.ones(3)}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert swapper.keys() == list(tensors) and swapper.stats().write_nbytes == written_nbytes
    back = swapper.swap_in_many(tensors)
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())
    swapper.swap_out_many({"large": torch.ones(20 << 20), "new": torch.ones(3)})
    assert bool((swapper.swap_in("large") == 1).all())


def test_wrong_batches_get_typed_errors_and_change_nothing(swapper: TensorSwapper) -> None:
    """Each names the tensor at fault."""
    # field case A04
    tensors = small(10) | {"square": torch.eye(3)}
    swapper.swap_out_many(tensors)
    bad: list[tuple[type[Exception], str, Any]] = [
        (SwapUsageError, "layer.44", lambda: swapper.swap_in_many([*tensors, "layer.44"])),
        (SwapManifestError, "layer.3", lambda: swapper.swap_in_many(
            tensors, out={"layer.3": torch.zeros(1024, dtype=torch.float16)})),
        (SwapManifestError, "layer.4", lambda: swapper.swap_in_many(
            tensors, out={"layer.4": torch.zeros(32, 32)})),
        (SwapUsageError, "sparse", lambda: swapper.swap_out_many(
            {"layer.0": torch.ones(7), "sparse": torch.eye(3).to_sparse()})),
        (SwapUsageError, "square", lambda: swapper.swap_out_many(
            {"layer.0": torch.ones(7), "square": torch.eye(3).to_sparse_csr()})),
        (SwapUsageError, "rows", lambda: swapper.swap_out_many(
            {"layer.0": torch.ones(7), "rows": torch.eye(3).to_sparse_csr()})),
        (SwapUsageError, "meta", lambda: swapper.swap_out_many(
            {"layer.0": torch.ones(7), "meta": torch.empty(3, device="meta")})),
    ]
    for kind, key, call in bad:
        with pytest.raises(kind, match=key):
            call()
    assert swapper.swap_in_many([]) == {}
    swapper.swap_out_many({})
    swapper.prefetch([])
    back = swapper.swap_in_many(tensors)
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())
    swapper.close()
    with pytest.raises(SwapUsageError, match="closed"):
        swapper.swap_in_many(["layer.0"])
    with pytest.raises(SwapUsageError, match="closed"):
        swapper.swap_out_many(tensors)
