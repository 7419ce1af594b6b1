"""`SwappedAdamW`: torch.optim.AdamW with its state on NVMe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from nvmeswap.config import DEFAULT_SUB_GROUP_NUMEL, AioConfig, SwapBlock, check_folders
from nvmeswap.errors import SwapError, SwapManifestError, SwapUsageError
from nvmeswap.stats import OptimizerStats
from nvmeswap.swap.home import ParameterHome, ResidentHome
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper, SubGroup
from nvmeswap.swap.pieces import AdamWOptions, adamw_update, check_options
from nvmeswap.swap.space import Placement, PoolRequest, SwapSpace, new_run_name
from nvmeswap.swap.sub_group import MASTER, Segment, SubGroupLayout

DEFAULT_BUFFER_COUNT = 3
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(eq=False, slots=True)
class Step:
    """A step under way. It is made whole and then set in one assignment, so that whatever
    interrupts a step, Ctrl-C included, the next call of `step` finds either none or one to go on
    with.

    `counts`: the step numbers that parameters are to have, by key. `remaining`: the sub-groups not
    yet updated. `walked`: all are, but with several ranks another one may not have got so far.
    """

    counts: dict[str, int]
    remaining: list[int]
    walked: bool = False


class SwappedAdamW(Optimizer):
    """AdamW whose fp32 state lives on NVMe and is in memory only while it is updated.

    The update is torch's fused kernel on the CPU: parameters are equal, bit for bit, to those of
    `torch.optim.AdamW(params, fused=True)`. bf16 parameters get an fp32 master on NVMe, too.

        optimizer = SwappedAdamW(model.parameters(), lr=1e-3, nvme_path="/mnt/nvme")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.close()

    Args: as torch.optim.AdamW; `nvme_path`, an existing folder, or one on each of several drives;
    `sub_group_size`, the most elements read, updated and written together; `buffer_count`, how many
    of those are in memory (3 overlap all three); `pin_memory`, page-lock them; `swap` and `aio`, as
    in the JSON.
    Raises: SwapPathError, SwapBudgetError, SwapSpaceError on construction; SwapReadError or
    SwapWriteError in `step`, which can be called again and goes on where it stopped.
    Blocking: `step` waits for the disk.
    Threads: the training loop's only.
    Not for parameters that are swapped themselves: that is `nvmeswap.zero3.shard`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        nvme_path: str | Path | Sequence[str | Path],
        sub_group_size: int = DEFAULT_SUB_GROUP_NUMEL,
        buffer_count: int = DEFAULT_BUFFER_COUNT,
        pin_memory: bool = True,
        swap: SwapBlock | None = None,
        aio: AioConfig | None = None,
    ) -> None:
        folders = check_folders(nvme_path, key="nvme_path")
        self._begin(params, lr, betas, eps, weight_decay, maximize, ResidentHome())
        layouts = self.lay_out(sub_group_size)
        classes = PipelinedOptimizerSwapper.slot_classes(layouts, buffer_count)
        self._space: SwapSpace | None = SwapSpace(
            Placement(folders, new_run_name()),
            {"optimizer": PoolRequest(classes)},
            swap=swap or SwapBlock(),
            aio=aio or AioConfig(),
            pin_memory=pin_memory,
        )
        self.attach(
            PipelinedOptimizerSwapper(
                layouts,
                store=self._space.store,
                pool=self._space.pools["optimizer"],
                timeout_s=self._space.timeout_s,
            )
        )

    @classmethod
    def over(
        cls,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        home: ParameterHome,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
    ) -> SwappedAdamW:
        """For plugs: an optimizer over a home of theirs. `lay_out` and `attach` must follow."""
        optimizer = cls.__new__(cls)
        optimizer._begin(params, lr, betas, eps, weight_decay, maximize, home)
        return optimizer

    def _begin(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
        home: ParameterHome,
    ) -> None:
        check_options(lr, betas, eps, weight_decay)
        self._home = home
        self._space = None
        self._swapper: PipelinedOptimizerSwapper | None = None
        self._step: Step | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._by_key = {home.key_of(parameter): parameter for parameter in self._trained()}
        self._parameters = set(self._by_key.values())

    def lay_out(self, sub_group_numel: int) -> list[SubGroupLayout]:
        """The sub-groups of all parameters that require gradients, in the order of the groups."""
        items = [self._home.item(parameter, STATES) for parameter in self._trained()]
        return PipelinedOptimizerSwapper.lay_out(items, sub_group_numel)

    def attach(self, swapper: PipelinedOptimizerSwapper) -> None:
        """Use `swapper`, laid out by `lay_out`, and write the first state: masters as the
        parameters are, moments zero, steps zero."""
        self._swapper = swapper

        def initial(key: str, name: str, start: int, stop: int) -> torch.Tensor | None:
            if name != MASTER:
                return None
            return self._home.initial_values(self._by_key[key])[start:stop]

        swapper.initialise(initial)

    # --- torch.optim.Optimizer ----------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        After an error nothing is lost: the next call goes on with the sub-groups that are left.
        """
        if closure is not None:
            raise SwapUsageError(
                "step(closure) is not served",
                fix="compute the loss and call backward() before step()",
            )
        swapper = self._attached()
        if self._step is None:
            self._refuse_strangers()
            self._home.before_step()
        gradients = {
            key: gradient
            for key, parameter in self._by_key.items()
            if (gradient := self._home.gradient(parameter)) is not None
        }
        if self._step is None:
            self._step = self._begin_step(swapper, gradients)
        elif self._step.counts.keys() - gradients.keys():
            raise SwapUsageError(
                "gradients were forgotten in the middle of a step that failed",
                fix="go back to a checkpoint; next time call step() again first",
            )
        error = None
        if not self._step.walked:
            try:
                self._walk(swapper, self._step, gradients)
            except SwapError as failure:
                error = failure
        self._home.after_step(error)
        self._step = None

    def _begin_step(
        self, swapper: PipelinedOptimizerSwapper, gradients: dict[str, torch.Tensor]
    ) -> Step:
        counts = {
            key: int(self.state.get(self._by_key[key], {}).get("step", 0)) + 1 for key in gradients
        }
        remaining = swapper.order(
            lambda group: any(segment.key in gradients for segment in group.layout.segments)
        )
        return Step(counts, remaining)

    def _refuse_strangers(self) -> None:
        """A parameter that was frozen when the optimizer was built has no state here."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._parameters and parameter.grad is not None:
                    raise SwapUsageError(
                        f"a parameter of shape {tuple(parameter.shape)} was frozen when this "
                        "optimizer was built, and has a gradient now",
                        fix="set requires_grad first, then build the optimizer",
                    )

    def _walk(
        self, swapper: PipelinedOptimizerSwapper, step: Step, gradients: dict[str, torch.Tensor]
    ) -> None:
        for key, count in step.counts.items():
            self.state[self._by_key[key]]["step"] = torch.tensor(float(count))
        # The groups are looked up anew: load_state_dict replaces them, users change them.
        options = {
            self._home.key_of(parameter): AdamWOptions.of(group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in self._parameters
        }

        def visit(sub_group: SubGroup) -> None:
            for segment in sub_group.layout.segments:
                gradient = gradients.get(segment.key)
                if gradient is not None and segment.key in options:
                    piece = gradient[segment.start : segment.stop]
                    self._update(sub_group, segment, piece, options[segment.key])

        swapper.walk(visit, step.remaining)
        step.walked = True

    def _update(
        self, sub_group: SubGroup, segment: Segment, gradient: torch.Tensor, options: AdamWOptions
    ) -> None:
        """Update one segment and hand its new values to the parameter."""
        parameter = self._by_key[segment.key]
        in_place = self._home.master_in_place(parameter)
        if in_place is None:
            master = sub_group.state_of(segment, MASTER)
            self._take_over_edits(parameter, segment, master)
        else:
            master = in_place[segment.start : segment.stop]
        output = sub_group.output_of(segment)
        adamw_update(
            master,
            gradient,
            sub_group.state_of(segment, "exp_avg"),
            sub_group.state_of(segment, "exp_avg_sq"),
            step=int(self.state[parameter]["step"].item()),
            options=options,
            output=output,
        )
        if in_place is None:
            values = master if output is None else output
            self._attached().written_with(
                sub_group, lambda: self._home.publish(parameter, segment.start, values)
            )

    def _take_over_edits(
        self, parameter: torch.Tensor, segment: Segment, master: torch.Tensor
    ) -> None:
        """Where the parameter is not its master rounded, somebody wrote to it: that is its
        value."""
        values = self._home.edited_values(parameter)
        if values is not None:
            edited = values[segment.start : segment.stop]
            changed = edited != master.to(edited.dtype)
            master[changed] = edited[changed].to(master.dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are kept on the host are forgotten (or zeroed), too."""
        if self._step is not None:
            raise SwapUsageError(
                "the last step failed half-way and still needs its gradients",
                fix="call step() again until it succeeds, or go back to a checkpoint",
            )
        super().zero_grad(set_to_none)
        self._home.zero_gradients(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, but only while the optimizer is being built."""
        if self._swapper is not None:
            raise SwapUsageError(
                "a group can't be added to a swapped optimizer that is in use",
                fix="give all groups to the constructor",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: `step`, `exp_avg`, `exp_avg_sq`, and `master` where there is one, all read
        into host memory."""
        swapper = self._attached()
        try:
            for key, parameter in self._by_key.items():
                state = self.state.get(parameter)
                if state:
                    numel = self._home.item(parameter, STATES).numel
                    for name in (MASTER, *STATES):
                        if numel == 0 or swapper.has_state(key, name):
                            flat = swapper.read_state(key, name, numel)
                            state[name] = self._home.state_like(parameter, flat)
            packed = super().state_dict()
            return {**packed, "state": {k: dict(state) for k, state in packed["state"].items()}}
        finally:
            self._forget_moments()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. A parameter without state starts from zero moments; where the state has a
        master, the parameter gets its values, else the master the parameter's.

        Raises SwapManifestError, before anything is changed, for a state of another size.
        """
        swapper = self._attached()
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = {
            parameter: state_dict["state"].get(index, {})
            for parameter, index in zip(parameters, saved, strict=False)
            if parameter in self._parameters
        }
        for parameter, state in states.items():
            self._check_sizes(parameter, state)
        steps_only = {
            index: {name: value for name, value in state.items() if name == "step"}
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": steps_only})
        for parameter, state in states.items():
            self._load_one(swapper, parameter, state)

    def _check_sizes(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        item = self._home.item(parameter, STATES)
        for name in (MASTER, *STATES):
            if name in state and state[name].numel() != item.numel:
                raise SwapManifestError(
                    f"{item.key}: the {name} to be loaded has {state[name].numel()} elements, "
                    f"not {item.numel}",
                    field="shape",
                    fix="load the state of a model of the same shape (and number of ranks)",
                )

    def _load_one(
        self, swapper: PipelinedOptimizerSwapper, parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        item = self._home.item(parameter, STATES)
        values = {name: state.get(name, torch.zeros(item.numel)) for name in STATES}
        if MASTER in state:
            values[MASTER] = state[MASTER]
            rounded = state[MASTER].detach().reshape(-1).to("cpu", item.output_dtype)
            for request in self._home.publish(parameter, 0, rounded):
                request.wait()
        swapper.write_state(item.key, values)

    def _forget_moments(self) -> None:
        for state in self.state.values():
            for name in (MASTER, *STATES):
                state.pop(name, None)

    # --- beyond torch -------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        raise SwapUsageError(
            "a swapped optimizer can't be copied or pickled", fix="save its state_dict()"
        )

    @property
    def step_is_unfinished(self) -> bool:
        """True if a step failed or was interrupted half-way: `step` must be called again, with the
        gradients as they are."""
        return self._step is not None

    def flush(self) -> None:
        """Wait until all state is on NVMe; raises what went wrong."""
        self._attached().flush()

    def stats(self) -> OptimizerStats:
        """Counters since the start."""
        return self._attached().stats()

    def close(self) -> None:
        """Remove the swap files and give the memory back; the optimizer can't be used after it."""
        self._swapper = None
        space, self._space = self._space, None
        if space is not None:
            space.close()

    @property
    def swapper(self) -> PipelinedOptimizerSwapper:
        """The state's swapper."""
        return self._attached()

    def _attached(self) -> PipelinedOptimizerSwapper:
        if self._swapper is None:
            raise SwapUsageError("this optimizer is closed", fix="build a new one")
        return self._swapper

    def _trained(self) -> list[torch.Tensor]:
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
