"""Stages come one after the other, and components with them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import nvmeswap
from nvmeswap.errors import SwapError, SwapReadError, SwapUsageError
from tests.offload.components import (
    DIM,
    TOKENS,
    Autoencoder,
    Denoiser,
    TextEncoder,
    nbytes_of,
    resident_nbytes,
    seeded,
)

KINDS: dict[str, type[nn.Module]] = {
    "text": TextEncoder, "transformer": Denoiser, "vae": Autoencoder,
}
SIZES = {name: nbytes_of(kind) for name, kind in KINDS.items()}
LARGEST_SET_NBYTES = max(SIZES["text"], SIZES["transformer"] + SIZES["vae"])


class Encode:
    def __init__(self, text: Any) -> None:
        self.text = text

    def __call__(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.text(tokens)
        return out


class Denoise:
    """Its transformer is in a stage of its own, and it looks at the vae's shift."""

    def __init__(self, transformer: Any, vae: Any) -> None:
        self.steps = {"step": [Step(transformer)]}
        self.vae = vae

    def __call__(self, x: Tensor) -> Tensor:
        shift = self.vae.encode(x).mean()
        for _ in range(3):
            x = self.steps["step"][0].run(x) + shift
        return x


class Step:
    __slots__ = ("transformer",)

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = self.transformer(x)
        return out


class Decode:
    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.vae.decode(self.vae.encode(x))
        return out


class Pause:
    """A stage that does what it is told. What that is belongs to the class, where no component is
    looked for: it asks all of them."""

    does: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)

    def __call__(self, x: Tensor) -> Tensor:
        type(self).does()
        return x


class Rig:
    """The pipeline, its components, and what was on the device at its most."""

    def __init__(self, place: dict[str, Any], **options: Any) -> None:
        self.built: list[str] = []

        def loader(name: str) -> Callable[[], nn.Module]:
            def load() -> nn.Module:
                self.built.append(name)
                return seeded(KINDS[name])
            return load

        self.components = {
            name: nvmeswap.lazy(loader(name), "cpu", name=name, **place) for name in KINDS
        }
        text, transformer, vae = self.components.values()
        self.pipeline = nvmeswap.LazyPipeline(
            [Encode(text), Pause(), Denoise(transformer, vae), Decode(vae)],
            self.components, **options,
        )
        self.peak_nbytes = 0

    @property
    def resident(self) -> set[str]:
        return {name for name in self.built if self.components[name].stats().resident_nbytes}

    def run(self) -> Tensor:
        def look(*_: object) -> None:
            nbytes = resident_nbytes(self.components[name] for name in self.built)
            self.peak_nbytes = max(self.peak_nbytes, nbytes)

        with torch.no_grad(), register_module_forward_hook(look):
            out: Tensor = self.pipeline(TOKENS)
        return out

    def close(self) -> None:
        self.pipeline.close()


def wanted() -> Tensor:
    text, transformer, vae = (seeded(kind) for kind in KINDS.values())
    with torch.no_grad():
        out: Tensor = Decode(vae)(Denoise(transformer, vae)(Encode(text)(TOKENS)))
    return out


@pytest.fixture(params=["cpu", "nvme"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"path": tmp_path} if request.param == "nvme" else {}


@pytest.fixture(autouse=True)
def during_pause() -> Any:
    """Say what happens in the stage that pauses."""
    def set_it(does: Callable[[], Any]) -> None:
        Pause.does = staticmethod(does)

    yield set_it
    set_it(lambda: None)


DuringPause = Callable[[Callable[[], Any]], None]


@pytest.fixture
def make_rig(place: dict[str, Any]) -> Any:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(place, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


MakeRig = Callable[..., Rig]


def test_peak_is_the_largest_overlapping_set(make_rig: MakeRig) -> None:
    # field case C20
    rig = make_rig()
    assert rig.pipeline.uses() == [{"text"}, set(), {"transformer", "vae"}, {"vae"}]
    assert rig.built == []
    for _ in range(3):
        assert torch.equal(rig.run(), wanted())
        assert rig.peak_nbytes <= LARGEST_SET_NBYTES * 1.05
        assert not rig.resident
    assert rig.built == ["text", "vae", "transformer"]


def test_next_component_is_there_before_its_stage(
    make_rig: MakeRig, during_pause: DuringPause
) -> None:
    # field case C21
    rig = make_rig(device_budget_bytes=1 << 30)
    rig.run()
    seen: list[bool] = []
    during_pause(lambda: seen.append(wait_for(lambda: rig.resident == {"transformer", "vae"})))
    assert torch.equal(rig.run(), wanted())
    assert seen == [True]
    assert not rig.resident


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true before long."""
    return any(condition() or threading.Event().wait(0.01) for _ in range(1000))


def test_prefetch_stays_within_the_device_budget(make_rig: MakeRig) -> None:
    # field case C20, C21
    for budget in (0, SIZES["text"] + SIZES["vae"]):
        rig = make_rig(device_budget_bytes=budget)
        for _ in range(2):
            assert torch.equal(rig.run(), wanted())
        assert rig.peak_nbytes <= max(budget, LARGEST_SET_NBYTES) * 1.05


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), Stop()])
def test_failed_stage_leaves_nothing_on_the_device(
    make_rig: MakeRig, during_pause: DuringPause, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    # field case C5
    rig = make_rig(device_budget_bytes=1 << 30)
    for _ in range(2):  # with and without something that is being prefetched
        during_pause(fail)
        with pytest.raises(type(error)) as raised:
            rig.run()
        assert raised.value is error
        assert not rig.resident
        during_pause(lambda: None)
        assert torch.equal(rig.run(), wanted())


def test_failed_release_does_not_replace_the_error_of_a_stage(
    make_rig: MakeRig, during_pause: DuringPause, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # field case C6
    rig = make_rig()
    rig.run()
    failing = break_release(monkeypatch, rig.components["vae"])
    error = ValueError("the stage's own")

    def load_and_fail() -> None:
        for component in rig.components.values():
            component.load()
        raise error

    during_pause(load_and_fail)
    with pytest.raises(ValueError, match="own") as raised:
        rig.run()
    assert raised.value is error
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1 and "vae" in told[0].getMessage()
    assert rig.resident == {"vae"}  # the others are gone
    during_pause(lambda: None)
    with pytest.raises(SwapReadError):  # without another error it is told
        rig.run()
    assert rig.resident == {"vae"}
    failing.clear()
    assert torch.equal(rig.run(), wanted())
    assert not rig.resident


def break_release(monkeypatch: pytest.MonkeyPatch, component: Any) -> list[int]:
    """Its releases fail as long as the list that is returned has something in it."""
    failing = [1]
    manager = component._lazy_component.manager()
    release = manager.release

    def fail() -> None:
        if failing:
            raise SwapReadError("the drive is gone")
        release()

    monkeypatch.setattr(manager, "release", fail)
    return failing


def test_only_listed_components_are_touched(place: dict[str, Any]) -> None:
    # field case C4
    text, vae, unused = (
        nvmeswap.lazy(lambda kind=kind: seeded(kind), "cpu", **place)
        for kind in (TextEncoder, Autoencoder, Denoiser)
    )
    stages: list[Any] = [Encode(text), Decode(vae)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipeline = nvmeswap.LazyPipeline(stages, {"vae": vae, "unused": unused})
        for _ in range(2):
            pipeline(TOKENS)
    assert [str(each.message).split(":")[0] for each in told] == [
        "no stage uses the component unused"
    ]
    assert text.stats().resident_nbytes > 0
    assert vae.stats().resident_nbytes == 0
    assert "not loaded" in repr(unused)
    for each in (text, vae, unused):
        each.close()
    with pytest.raises(SwapUsageError, match="plain"):
        nvmeswap.LazyPipeline(stages, {"plain": seeded(Denoiser)})


def test_component_that_was_not_found_is_released_at_the_end(place: dict[str, Any]) -> None:
    vae = nvmeswap.lazy(lambda: seeded(Autoencoder), "cpu", **place)
    hidden = {"vae": vae}

    def stage(x: Tensor) -> Tensor:
        out: Tensor = globals()["HIDDEN"]["vae"].encode(x)
        return out

    globals()["HIDDEN"] = hidden
    with pytest.warns(UserWarning, match="vae"):
        pipeline = nvmeswap.LazyPipeline([stage, torch.relu], {"vae": vae})
    pipeline(torch.ones(2, DIM))
    assert vae.stats().bring_count > 0 and vae.stats().resident_nbytes == 0
    vae.close()


def test_loader_is_called_by_who_runs_the_pipeline_and_its_failure_is_told(
    place: dict[str, Any], tmp_path: Path, during_pause: DuringPause
) -> None:
    """What can't be prefetched is met again in its own stage, and not in the one before."""
    threads: list[threading.Thread] = []

    def build() -> nn.Module:
        threads.append(threading.current_thread())
        return Autoencoder()

    text = nvmeswap.lazy(lambda: seeded(TextEncoder), "cpu", **place)
    path = tmp_path / "vae.safetensors"
    save_file({"shift": torch.zeros(DIM)}, path)
    vae = nvmeswap.lazy(build, "cpu", checkpoint=path, name="vae", **place)
    pipeline = nvmeswap.LazyPipeline(
        [Encode(text), Pause(), Decode(vae)], {"text": text, "vae": vae},
        device_budget_bytes=1 << 30,
    )
    reached: list[int] = []
    during_pause(lambda: reached.append(1))
    with pytest.raises(SwapError):
        pipeline(TOKENS)
    assert reached and threads == [threading.current_thread()]
    assert text.stats().resident_nbytes == 0
    save_file(seeded(Autoencoder).state_dict(), path)
    assert torch.equal(pipeline(TOKENS), Decode(seeded(Autoencoder))(Encode(text)(TOKENS)))
    pipeline.close()
