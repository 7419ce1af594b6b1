"""A lazy module is the module, but for where its values are."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeswap
from nvmeswap.errors import SwapClosedError, SwapUsageError
from nvmeswap.offload.lazy import LazyModule
from tests.offload.components import DIM, Autoencoder, Denoiser, TextEncoder, seeded

X = torch.linspace(-1, 1, 8 * DIM).view(8, DIM)
Make = Callable[..., Any]


@pytest.fixture(params=["cpu", "nvme"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """`lazy` for the CPU as device; what was made is closed at the end."""
    made: list[Any] = []

    def lazy(loader: Callable[[], object], **options: Any) -> Any:
        place = {"path": tmp_path} if request.param == "nvme" else {}
        made.append(nvmeswap.lazy(loader, "cpu", **place, **options))
        return made[-1]

    yield lazy
    for each in made:
        each.close()


def test_lazy_equals_its_module(make: Make) -> None:
    loads: list[int] = []

    def load() -> nn.Module:
        loads.append(1)
        return seeded(Denoiser)

    lazy = make(load)
    assert isinstance(lazy, LazyModule) and not loads
    wanted = seeded(Denoiser)(X)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(lazy(X), wanted)
            assert torch.equal(lazy.forward(x=X), wanted)
            lazy.release()
    assert isinstance(lazy, Denoiser) and isinstance(lazy, nn.Module)
    assert loads == [1]
    assert len(lazy.blocks) == 3 and "hidden_size" in dir(lazy)
    assert lazy.device == torch.device("cpu")


def test_methods_load_and_return_the_lazy_one(make: Make) -> None:
    lazy, plain = make(lambda: seeded(Autoencoder)), seeded(Autoencoder)
    latent = plain.encode(X)
    assert lazy.eval() is lazy and lazy.to("cpu") is lazy and lazy.requires_grad_(False) is lazy
    assert lazy.stats().bring_count == 0
    assert torch.equal(lazy.decode(lazy.encode(X)), plain.decode(latent))
    assert lazy.stats().resident_nbytes > 0
    # Parts of it can be called by themselves, also while it is released.
    lazy.release()
    assert torch.equal(lazy.decoder(latent), plain.decoder(latent))


def test_attributes_of_a_released_component_cost_no_transfer(make: Make) -> None:
    # field case C3
    lazy = make(lambda: seeded(Denoiser))
    lazy(X)
    lazy.release()
    before = lazy.stats()
    assert lazy.hidden_size == DIM and lazy.sparse is False and lazy.training
    assert lazy.scale.shape == (DIM,) and lazy.scale.dtype is torch.float32
    assert [tuple(p.shape) for p in lazy.blocks[0].parameters()] == [
        (512, DIM), (512,), (DIM, 512), (DIM,),
    ]
    assert lazy.stats() == before and before.resident_nbytes == 0


def test_state_dict_is_real_in_every_state(make: Make) -> None:
    lazy, wanted = make(lambda: seeded(Denoiser)), seeded(Denoiser).state_dict()
    for use in (lambda: None, lazy.load, lazy.release):
        use()
        got = lazy.state_dict()
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name].cpu(), value) for name, value in wanted.items())
    lazy.load_state_dict({name: value + 1 for name, value in wanted.items()})
    changed = seeded(Denoiser)
    changed.load_state_dict({name: value + 1 for name, value in wanted.items()})
    assert torch.equal(lazy(X), changed(X))


class Adapted(nn.Module):
    """A layer with a low-rank addition, as LoRA has."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.full((DIM, 2), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + (x @ self.down).sum(-1, keepdim=True)
        return out


def edit_in_place(module: Any) -> None:
    with torch.no_grad():
        module.scale.mul_(3)
        module.frequencies.add_(1)


def edit_through_data(module: Any) -> None:
    module.blocks[1][0].weight.data += 1
    module.scale.data.add_(2)


def replace_data(module: Any) -> None:
    module.scale.data = torch.full((DIM,), 5.0)


def set_a_flag(module: Any) -> None:
    module.sparse = True


def add_an_adapter(module: Any) -> None:
    module.blocks[0][0] = Adapted(module.blocks[0][0])


def replace_a_parameter(module: Any) -> None:
    module.scale = nn.Parameter(torch.full((DIM,), 0.5), requires_grad=False)


@pytest.mark.parametrize("edit", [
    edit_in_place, edit_through_data, replace_data, set_a_flag, add_an_adapter, replace_a_parameter,
])
@pytest.mark.parametrize("when", ["loaded", "released"])
def test_changes_after_loading_survive_releases(
    make: Make, edit: Callable[[Any], None], when: str
) -> None:
    # field case C1, C2
    if edit is edit_through_data and when == "released":
        pytest.skip("what NVMe shows while it is away is changed through torch")
    if edit is add_an_adapter:
        def wide() -> nn.Module:
            torch.manual_seed(7)
            return Denoiser(DIM).requires_grad_(False)
    else:
        def wide() -> nn.Module:
            return seeded(Denoiser)
    lazy, plain = make(wide), wide()
    lazy(X)
    if when == "released":
        lazy.release()
    edit(lazy)
    edit(plain)
    with torch.no_grad():
        for _ in range(3):
            lazy.release()
            assert torch.equal(lazy(X), plain(X))
    lazy.release()
    assert lazy.stats().resident_nbytes == 0


def test_compiled_component_keeps_both_compilation_and_release(make: Make) -> None:
    # field case C8
    lazy, wanted = make(lambda: seeded(Denoiser)), seeded(Denoiser)(X)
    compiled_graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    lazy.compile(backend=backend)
    for _ in range(2):
        assert torch.equal(lazy(X), wanted)
        count = len(compiled_graphs)
        lazy.release()
        assert lazy.stats().resident_nbytes == 0
    assert count == len(compiled_graphs) > 0
    torch._dynamo.reset()


def test_torch_compile_takes_a_lazy_module(make: Make) -> None:
    # field case C8
    lazy, wanted = make(lambda: seeded(Autoencoder)), seeded(Autoencoder)
    torch._dynamo.reset()
    decode = torch.compile(lambda x: lazy.decode(x), backend="eager")
    for _ in range(2):
        assert torch.equal(decode(X[:, :1].expand(8, 256)), wanted.decode(X[:, :1].expand(8, 256)))
        lazy.release()
    assert lazy.stats().resident_nbytes == 0
    torch._dynamo.reset()


def test_released_component_is_kept_alive_by_nothing(make: Make) -> None:
    # field case C9
    lazy = make(lambda: seeded(TextEncoder))
    lazy(torch.arange(8))
    lazy.prefetch()
    lazy.release()
    assert lazy.stats().resident_nbytes == 0
    module = weakref.ref(lazy.layers)
    lazy.close()
    gc.collect()
    assert module() is None


def test_component_that_nobody_holds_goes_without_being_closed(tmp_path: Path) -> None:
    # field case C9
    lazy = nvmeswap.lazy(lambda: seeded(TextEncoder), "cpu", path=tmp_path)
    pipeline = nvmeswap.LazyPipeline([lazy], {"text": lazy}, device_budget_bytes=1 << 30)
    pipeline(torch.arange(8))
    module = weakref.ref(lazy.layers)
    del lazy, pipeline
    gc.collect()
    assert module() is None
    assert list(tmp_path.rglob("*.swp")) == []


def test_failed_call_gives_back_what_it_brought(make: Make) -> None:
    # field case C5
    lazy = make(lambda: seeded(Denoiser))
    for was_loaded in (False, True):
        with pytest.raises(RuntimeError):
            lazy(torch.ones(3, 3))
        assert (lazy.stats().resident_nbytes > 0) is was_loaded
        assert torch.equal(lazy(X), seeded(Denoiser)(X))


def test_threads_share_one_load(make: Make) -> None:
    loads: list[int] = []
    ready = threading.Barrier(4)

    def load() -> nn.Module:
        loads.append(1)
        return seeded(Denoiser)

    lazy, wanted, outs = make(load), seeded(Denoiser)(X), []

    def use() -> None:
        ready.wait()
        with torch.no_grad():
            for _ in range(10):
                outs.append(torch.equal(lazy(X), wanted))
                lazy.release()
                lazy.prefetch()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outs == [True] * 40 and loads == [1]
    lazy.release()
    assert lazy.stats().resident_nbytes == 0


@pytest.mark.parametrize("built", [None, 3, object])
def test_loader_that_returns_no_module_is_named(make: Make, built: object) -> None:
    lazy = make(lambda: built, name="text_encoder")
    for _ in range(2):
        with pytest.raises(SwapUsageError, match="text_encoder"):
            lazy(X)
    assert repr(lazy) == "<lazy text_encoder on cpu, not loaded>"


def test_loader_that_fails_is_asked_again(make: Make) -> None:
    attempts: list[int] = []

    def load() -> nn.Module:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("no network")
        return seeded(Denoiser)

    lazy = make(load)
    with pytest.raises(RuntimeError, match="no network"):
        lazy(X)
    assert torch.equal(lazy(X), seeded(Denoiser)(X))


def test_misuse_is_told(make: Make) -> None:
    lazy = make(lambda: seeded(Denoiser))
    for misuse in (lambda: lazy.half(), lambda: lazy.to(torch.bfloat16), lambda: lazy.to("cuda:0"),
                   lambda: copy.deepcopy(lazy), lambda: make(Denoiser, dtype=torch.float16)):
        with pytest.raises(SwapUsageError):
            misuse()
    with pytest.raises(TypeError, match="prefetches"):
        make(Denoiser, prefetches=2)
    assert lazy.float() is lazy and lazy.to(torch.float32) is lazy
    with pytest.raises(AttributeError):
        lazy.unknown  # noqa: B018
    lazy.close()
    lazy.close()
    with pytest.raises(SwapClosedError):
        lazy(X)


def test_lazy_module_can_be_part_of_another(make: Make) -> None:
    lazy = make(lambda: seeded(Denoiser))
    stage = nn.Module()
    stage.denoiser = lazy
    assert torch.equal(stage.denoiser(X), seeded(Denoiser)(X))
    assert len(list(stage.parameters())) == len(list(Denoiser().parameters()))
