"""Faults that users of such systems met, each with its small input and the right result here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager, SwapError
from nvmeswap.io.engine import Engine
from tests.offload.conftest import Manage
from tests.offload.language import TinyLanguageModel, language_loss
from tests.offload.moving_structures import ORDERS, Ordered
from tests.offload.runs import (
    DIM,
    assert_equal,
    call,
    collect,
    copied,
    forward_and_backward,
    frozen,
    infer,
    input_of,
    stack,
    train,
    twins,
)
from tests.offload.structures import TiedByParameter, tokens
from tests.oracle import Run

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])
both_kinds = pytest.mark.parametrize("kind", ["frozen", "trained"])


def a_stack(kind: str) -> nn.Module:
    return frozen(stack()) if kind == "frozen" else stack()


# --- C: structure and layout ---------------------------------------------------------------------


@tiers
@both_kinds
def test_edits_in_materialize_are_written_back(manage: Manage, tier: str, kind: str) -> None:
    """By modules, by parameters, and of all; whatever the window is. field case C03"""
    plain, model = a_stack(kind), a_stack(kind)
    manager = manage(model, tier=tier, trainable=tier)
    infer(model)
    for names, layers in ((["0"], [0]), (["2.weight", "3"], [2, 3]), ([], range(6))):
        with manager.materialize(*names), torch.no_grad():
            assert manager.stats().resident_unit_count >= len(layers)
            for each in (plain, model):
                for layer in layers:
                    each[layer].weight.add_(1)
                    each[layer].bias.data = each[layer].bias.data * 2 + 1
        assert manager.stats().resident_unit_count == 0
        assert_equal(infer(model), infer(plain))
    assert_equal(train(model), train(plain))
    manager.close()
    assert_equal(infer(model), infer(plain))


@tiers
def test_materialize_around_calls_nested_and_with_errors(manage: Manage, tier: str) -> None:
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier)
    with manager.materialize("1"), manager.materialize("1", "2"):
        assert_equal(train(model), train(plain))
        assert manager.stats().resident_unit_count >= 2
    assert manager.stats().resident_unit_count == 0
    with pytest.raises(ZeroDivisionError), manager.materialize("1"), torch.no_grad():
        for each in (plain, model):
            each[1].weight.mul_(2)
        raise ZeroDivisionError
    assert manager.stats().resident_unit_count == 0
    assert_equal(infer(model), infer(plain))
    with pytest.raises(SwapError, match="nowhere") as raised, manager.materialize("nowhere"):
        pass
    assert raised.value.fix


@tiers
@pytest.mark.parametrize("prefetch", [1, 5])
def test_layers_that_are_skipped_give_their_place_back(
    manage: Manage, tier: str, prefetch: int
) -> None:
    """Two slots; a prefetched layer may never be called. field case C09; features G2, G3"""
    plain, model = twins(Ordered)
    manager = manage(model, tier=tier, trainable=tier, prefetch=prefetch, buffer_count=2)
    for order in (*ORDERS, *reversed(ORDERS), *ORDERS):
        ours, theirs = (
            forward_and_backward(each, lambda m, x, n, order=order: m(x, order), 0)
            for each in (model, plain)
        )
        assert_equal(Run([], ours), Run([], theirs))
        assert manager.stats().resident_unit_count == 0
    assert manager.stats().peak_resident_unit_count <= prefetch + 1


def test_unit_holds_its_subtree_once(manage: Manage) -> None:
    """field case C10"""
    unit = nn.Sequential(
        nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
    )
    model = nn.Sequential(unit, nn.Linear(DIM, DIM))
    nbytes = sum(parameter.nbytes for parameter in unit.parameters())
    manager = manage(model, tier="cpu", trainable="cpu", granularity="block")
    (ours,) = (each for each in manager.units if each.name == "0")
    assert sorted(ours.names) == sorted(f"0.{name}" for name, _ in unit.named_parameters())
    assert nbytes <= ours.nbytes <= nbytes + 256 * len(ours.names)
    before = manager.stats().in_nbytes
    with torch.no_grad():
        unit(input_of(0))
    assert manager.stats().in_nbytes - before == ours.nbytes


@tiers
def test_tensor_that_is_held_outlives_what_it_was_read_from(
    tmp_path: Path, tier: str
) -> None:
    """Also its file, its slot and its manager. field case C12"""
    plain, model = stack(), stack()
    options: dict[str, Any] = {"path": tmp_path} if tier == "nvme" else {}
    manager = OffloadManager(model, "cpu", tier=tier, trainable=tier, buffer_count=1, **options)
    held = [layer.weight.data for layer in model]
    states = model.state_dict()
    infer(model)
    manager.close()
    del manager, model
    collect()
    for number, layer in enumerate(plain):
        assert torch.equal(held[number], layer.weight)
        assert torch.equal(states[f"{number}.weight"], layer.weight)
    assert_equal(infer(stack()), infer(plain))


# --- D: silent wrong numbers ---------------------------------------------------------------------


@tiers
def test_one_slot_is_never_filled_before_it_was_used(
    manage: Manage, engines: list[Engine], tier: str
) -> None:
    """field case D05"""
    plain, model = stack(), stack()
    manage(model, tier=tier, trainable=tier, buffer_count=1, prefetch=3)
    for engine in engines:
        engine.inject("seed 2 rate 40 late,delay")
    assert_equal(train(model), train(plain))


@tiers
def test_unit_on_its_way_may_be_released_and_wanted_again(manage: Manage, tier: str) -> None:
    """field case D06"""
    plain, model = frozen(stack(2)), frozen(stack(2))
    manager = manage(model, tier=tier, prefetch=1)
    x = input_of(0)
    expected = plain(x)
    with torch.no_grad():
        model(x)
        for _ in range(100):
            model[0](x)  # which brings the second one ahead
            manager.release()
            assert torch.equal(model(x), expected)


@tiers
@both_kinds
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_of_swapped_blocks_are_exact(
    manage: Manage, tier: str, kind: str, checkpointing: bool
) -> None:
    """Four blocks, two places, float64. field case D07"""
    plain, model = (nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        each.double()
        if kind == "frozen":
            frozen(each)
    manage(model, tier=tier, trainable=tier, prefetch=1)

    def forward(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        x = x.double()
        for block in model:
            if checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x

    assert_equal(train(model, forward), train(plain, forward))


@tiers
@pytest.mark.parametrize("when", ["before", "after"])
def test_updates_reach_the_store(manage: Manage, tier: str, when: str) -> None:
    """field case D09"""
    plain, model = stack(), stack()
    first = copied(model)
    if when == "before":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = manage(model, tier=tier, trainable=tier)
    if when == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer=optimizer)
    train(plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1))
    manager.release()
    for name, tensor in manager.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])
        assert not torch.equal(tensor, first.state_dict()[name])


@tiers
def test_what_is_on_a_parameter_stays(manage: Manage, tier: str) -> None:
    """requires_grad, grad and the user's attributes. field case D10"""
    model = stack()
    model[1].weight.requires_grad_(False)
    for index, parameter in enumerate(model.parameters()):
        parameter.mark = ("mine", index)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    model[0].weight.grad = torch.ones(DIM, DIM)
    manager = manage(model, tier=tier, trainable=tier)
    forward_and_backward(model, call, 0)
    kept = [parameter.grad for parameter in model.parameters()]
    infer(model)
    manager.release()
    manager.close()
    for index, parameter in enumerate(model.parameters()):
        assert parameter.mark == ("mine", index) and parameter.requires_grad is flags[index]
        assert parameter.grad is kept[index] and parameter.is_leaf
    reference = stack()
    reference[0].weight.grad = torch.ones(DIM, DIM)
    forward_and_backward(reference, call, 0)
    assert torch.equal(model[0].weight.grad, reference[0].weight.grad)


@tiers
def test_gradient_set_to_zero_is_added_to(manage: Manage, tier: str) -> None:
    """It stays the same tensor over steps. field case D10"""
    plain, model = stack(), stack()
    manage(model, tier=tier, trainable=tier)
    for each in (plain, model):
        forward_and_backward(each, call, 0)
        grads = [parameter.grad for parameter in each.parameters()]
        each.zero_grad(set_to_none=False)
        forward_and_backward(each, call, 1)
        forward_and_backward(each, call, 2)
        assert all(p.grad is grad for p, grad in zip(each.parameters(), grads, strict=True))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# --- E: loaders ----------------------------------------------------------------------------------


@tiers
def test_tensors_on_meta_are_three_different_ones_once_they_are_filled(
    manage: Manage, tier: str
) -> None:
    """Or refused by name. field case E03"""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    plain = stack(3)
    try:
        manager = manage(model, tier=tier, trainable=tier)
    except SwapError as error:
        assert "0.weight" in str(error) and error.fix
        return
    manager.load_state_dict(plain.state_dict())
    assert_equal(infer(model), infer(plain))


@pytest.mark.parametrize("granularity", ["leaf", "block", 4000])
def test_whole_language_model_is_on_nvme(manage: Manage, granularity: Any) -> None:
    """field case E05"""
    plain, model = twins(TinyLanguageModel)
    manager = manage(model, trainable="nvme", granularity=granularity)
    assert sum(len(unit.names) for unit in manager.units) == len(
        [*model.parameters(), *model.buffers()]
    )
    assert_equal(train(model, language_loss), train(plain, language_loss))
    assert manager.stats().resident_nbytes == 0


def test_thousands_of_tensors_are_few_requests(manage: Manage, engines: list[Engine]) -> None:
    """They lie in their unit one after the other. field case E06"""
    model = nn.Module()
    for number in range(3000):
        model.register_parameter(f"p{number}", nn.Parameter(torch.full((3,), float(number))))
    model.forward = lambda x: x + model.p2999  # type: ignore[method-assign]
    began = len(engines)
    manager = manage(frozen(model))
    assert len(manager.units) == 1
    engine = engines[began:][-1]
    before = engine.stats().request_count
    assert torch.equal(model(torch.zeros(3)), torch.full((3,), 2999.0))
    assert engine.stats().request_count - before <= 4  # reads ahead for the next call among them


@tiers
@pytest.mark.parametrize("through", ["model", "manager"])
def test_state_saved_while_offloaded_is_real(
    manage: Manage, tmp_path: Path, tier: str, through: str
) -> None:
    """Nested and tied ones too, through a file, while units come and go. field case E07;
    features F15, A28, 3.2"""
    plain, model = twins(TinyLanguageModel)
    manager = manage(model, tier=tier, trainable=tier)
    assert_equal(train(model, language_loss), train(plain, language_loss))
    source: Any = model if through == "model" else manager
    torch.save(source.state_dict(), tmp_path / "saved")
    fresh = TinyLanguageModel()
    fresh.load_state_dict(torch.load(tmp_path / "saved"))
    assert_equal(infer(fresh.eval(), language_loss), infer(plain.eval(), language_loss))
    assert (tmp_path / "saved").stat().st_size < 3 * sum(p.nbytes for p in plain.parameters())


@tiers
@both_kinds
@pytest.mark.parametrize("through", ["model", "manager"])
def test_state_loaded_while_offloaded_is_used(
    manage: Manage, tier: str, kind: str, through: str
) -> None:
    plain, model = twins(TiedByParameter)
    torch.manual_seed(9)
    other = TiedByParameter()
    if kind == "frozen":
        frozen(plain), frozen(model)
    manager = manage(model, tier=tier, trainable=tier)
    infer(model, tokens)
    parameters = dict(model.named_parameters())
    source: Any = model if through == "model" else manager
    source.load_state_dict(other.state_dict())
    plain.load_state_dict(other.state_dict())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert_equal(infer(model, tokens), infer(plain, tokens))
    assert_equal(train(model, tokens), train(plain, tokens))


@tiers
def test_state_that_does_not_fit_is_refused_or_not_strict(manage: Manage, tier: str) -> None:
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier)
    missing = {name: t for name, t in plain.state_dict().items() if name != "3.weight"}
    unknown = {**plain.state_dict(), "7.weight": torch.zeros(3)}
    shape = {**plain.state_dict(), "3.weight": torch.zeros(3)}
    for wrong in (missing, unknown, shape):
        with pytest.raises((SwapError, RuntimeError), match=r"[37]\.weight"):
            manager.load_state_dict(wrong)
    assert_equal(infer(model), infer(plain))
    manager.load_state_dict({"0.bias": torch.ones(DIM)}, strict=False)
    plain.load_state_dict({"0.bias": torch.ones(DIM)}, strict=False)
    assert_equal(infer(model), infer(plain))


@tiers
def test_moving_a_managed_model_to_where_it_is_makes_no_copy(manage: Manage, tier: str) -> None:
    """features A36; field case B13"""
    plain, model = frozen(stack()), frozen(stack())
    manage(model, tier=tier)
    numbers = infer(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    model.to("cpu")
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert_equal(infer(model), infer(plain))
    assert_equal(numbers, infer(plain))


@tiers
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_converting_a_managed_model_by_hand_is_refused_or_right(
    manage: Manage, tier: str, target: Any
) -> None:
    """features A36"""
    plain, model = frozen(stack()), frozen(stack())
    manage(model, tier=tier)

    def cast(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return model(x if target == "meta" else x.to(target))

    try:
        model.to(target)
        numbers = infer(model, cast)
    except SwapError as error:
        assert error.fix
    except RuntimeError as error:
        assert target == "meta", error
    else:
        assert_equal(numbers, infer(plain.to(target), cast))
