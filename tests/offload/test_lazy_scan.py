"""A stage's components are found wherever it keeps them, and looking loads nothing."""
# field case C7

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nvmeswap
from tests.offload.components import DIM, Autoencoder, Denoiser, seeded


def never() -> nn.Module:
    raise AssertionError("looking must not load")


VAE = nvmeswap.lazy(never, "cpu", name="vae")
OTHER = nvmeswap.lazy(never, "cpu", name="other")
PARTS = SimpleNamespace(vae=VAE, other=OTHER)


class Stage:
    """Whatever it is made of; a computed attribute must not be asked for."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.myself = self
        self.ring: list[Any] = [self]
        self.ring.append(self.ring)

    @property
    def computed(self) -> None:
        raise AssertionError("asked for")

    def __call__(self, x: Any) -> Any:
        return x


class Slotted:
    __slots__ = ("not_set", "part")

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: Any) -> Any:
        return x


class Parent(Stage):
    """All stages in one object, as many pipelines are written."""

    def decode(self, x: Any) -> Any:
        return self._decode(x)

    def _decode(self, x: Any) -> Any:
        return self.vae.decode(x)  # type: ignore[attr-defined]

    def encode(self, x: Any) -> Any:
        return self.other(x)  # type: ignore[attr-defined]


def uses_global(x: Any) -> Any:
    return VAE.decode(x)


def uses_global_by_name(x: Any) -> Any:
    return PARTS.vae.decode(x)


def uses_function(x: Any) -> Any:
    return [uses_global(each) for each in x]


def closure() -> Callable[[Any], Any]:
    kept, parts = VAE, SimpleNamespace(vae=VAE, other=OTHER)
    return lambda x: kept(x) if x else parts.vae(x)


def module_with(part: Any) -> nn.Module:
    stage = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    object.__setattr__(stage[1], "part", part)
    return stage


PARENT = Parent(vae=VAE, other=OTHER)
FINDS = {
    "attribute": Stage(part=VAE),
    "nested stage": Stage(stages=Stage(inner=Stage(part=VAE))),
    "list": Stage(parts=[1, [VAE]]),
    "tuple": Stage(parts=(None, VAE)),
    "dict": Stage(parts=OrderedDict(a={"b": VAE})),
    "key": Stage(parts={VAE: 1}),
    "mapping": Stage(parts=MappingProxyType({"a": VAE})),
    "set": Stage(parts={VAE}),
    "frozenset": Stage(parts=frozenset([VAE])),
    "deque": Stage(parts=deque([VAE])),
    "namespace": Stage(parts=SimpleNamespace(vae=VAE)),
    "slots": Slotted(VAE),
    "closure": closure(),
    "partial": functools.partial(lambda part, x: x, VAE),
    "keyword of a partial": functools.partial(Stage().__call__, x=VAE),
    "default": lambda x, part=VAE: part(x),
    "keyword default": (lambda: lambda x, *, part=VAE: part(x))(),
    "function as attribute": Stage(function=closure()),
    "global": uses_global,
    "global's attribute": uses_global_by_name,
    "function of a function": uses_function,
    "wrapped function": functools.wraps(uses_global)(lambda x: x),
    "method": PARENT.decode,
    "module's attribute": module_with(VAE),
}


@pytest.mark.parametrize("stage", FINDS.values(), ids=FINDS)
def test_scan_finds_exactly_what_the_stage_keeps(stage: Any) -> None:
    pipeline = nvmeswap.LazyPipeline(
        [stage, PARENT.encode], {"vae": VAE, "other": OTHER}
    )
    assert pipeline.uses() == [{"vae"}, {"other"}]


def test_other_pipelines_are_no_place_to_look() -> None:
    """A stage that knows its pipeline does not use all of it."""
    stage = Stage(part=VAE)
    pipeline = nvmeswap.LazyPipeline([stage, Stage(part=OTHER)], {"vae": VAE, "other": OTHER})
    stage.pipeline = pipeline  # type: ignore[attr-defined]
    assert pipeline.uses() == [{"vae"}, {"other"}]


def test_part_of_a_component_counts_as_the_component() -> None:
    vae = nvmeswap.lazy(lambda: seeded(Autoencoder), "cpu")
    pipeline = nvmeswap.LazyPipeline([Stage(part=vae.decoder)], {"vae": vae})
    assert pipeline.uses() == [{"vae"}]
    vae.close()


def test_stages_are_looked_at_again_in_each_run() -> None:
    denoiser = nvmeswap.lazy(lambda: seeded(Denoiser), "cpu")
    pipeline = nvmeswap.LazyPipeline([Stage(part=denoiser), torch.relu], {"denoiser": denoiser})
    assert pipeline.uses() == [{"denoiser"}, set()]
    pipeline.stages[1] = denoiser
    assert pipeline.uses() == [{"denoiser"}, {"denoiser"}]
    x = torch.ones(1, DIM)
    assert torch.equal(pipeline(x), seeded(Denoiser)(x))
    assert denoiser.stats().resident_nbytes == 0
    pipeline.close()
