"""Stages that run one after the other, and which components are on the device meanwhile."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from nvmeswap.errors import SwapUsageError
from nvmeswap.offload.component import Component
from nvmeswap.offload.lazy import LazyModule
from nvmeswap.offload.stage_scan import components_in

log = logging.getLogger("nvmeswap.lazy")


class LazyPipeline:
    """Runs stages in order; each of its components is on the device from its first use to the end
    of the last stage that uses it.

        pipeline = LazyPipeline(
            [encode, denoise, decode], {"text": text, "transformer": transformer, "vae": vae}
        )
        image = pipeline(prompt)          # decode(denoise(encode(prompt)))

    Which stage uses which is found by looking into the stages before each run: through attributes,
    nested stages, lists, tuples, dicts, sets, partials, and what functions close over or mention.
    A component that is used although it was not found there is released at the end of the run.
    While a stage runs, those that the next stage needs besides are prefetched: to the device, if
    with them it holds at most `device_budget_bytes`; else into host memory, as far as their
    `max_in_cpu` goes. An exception in a stage, Ctrl-C too, releases all components.

    Args: `stages`, callables, each given what the one before returned, and further arguments of the
    call; the list may be changed between runs. `components`, made by `lazy`, by name: lazy modules
    that are not among them are left alone.
    Raises: SwapUsageError for a component that is not lazy; a call raises what a stage or a load
    raises. Warns of a component that no stage uses.
    Blocking: a call runs all stages. Threads: one at a time.
    """

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        components: Mapping[str, Any],
        *,
        device_budget_bytes: int | None = None,
    ) -> None:
        for name, each in components.items():
            if type(each) is not LazyModule:
                raise SwapUsageError(
                    f"the component {name} is a {type(each).__name__}, and not lazy",
                    fix="make it by nvmeswap.lazy(loader), and give that to the stages as well",
                )
        self.stages = list(stages)
        self.device_budget_bytes = device_budget_bytes
        self._components = {name: each._lazy_component for name, each in components.items()}
        unused = self._components.keys() - set().union(*self.uses())
        for name in sorted(unused):
            warnings.warn(
                f"no stage uses the component {name}: it is loaded when something asks for it, and "
                "released at the end of a run",
                stacklevel=2,
            )

    def uses(self) -> list[frozenset[str]]:
        """For each stage the names of the components that it was found to use. Loads nothing."""
        owners: dict[nn.Module, Component] = {
            module: component
            for component in self._components.values()
            if component.is_built
            for module in component.module().modules()
        }
        names = {component: name for name, component in self._components.items()}
        found = (components_in(stage, owners, skip=LazyPipeline) for stage in self.stages)
        return [frozenset(names[each] for each in some & names.keys()) for some in found]

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """What the last stage returns."""
        stages, uses = list(self.stages), self.uses()
        try:
            for index, stage in enumerate(stages):
                with self._prefetching(index, uses):
                    value = stage(value, *args, **kwargs)
                later = frozenset().union(*uses[index + 1 :])
                self._release(uses[index] - later)
            self._release(self._components)
        except BaseException:
            self._release_quietly()
            raise
        return value

    def release(self) -> None:
        """Take all components from the device."""
        self._release(self._components)

    def close(self) -> None:
        """Close all components. Idempotent."""
        for component in self._components.values():
            component.close()

    # --- inside -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _prefetching(self, index: int, uses: Sequence[frozenset[str]]) -> Iterator[None]:
        """What comes next is read when this stage has what it needs itself, and not against it."""
        here = [self._components[name] for name in uses[index]]
        later = next((some - uses[index] for some in uses[index + 1 :] if some - uses[index]), ())
        following = [self._components[name] for name in sorted(later)]
        for component in following:
            component.build_skeleton()

        def prefetch_when_all_are_here() -> None:
            if following and all(component.is_loaded for component in here):
                upcoming, following[:] = list(following), []
                self._prefetch(upcoming, here)

        for component in here:
            component.when_loaded = prefetch_when_all_are_here
        try:
            prefetch_when_all_are_here()
            yield
        finally:
            for component in here:
                component.when_loaded = None

    def _prefetch(self, following: Sequence[Component], here: Sequence[Component]) -> None:
        held = {each for each in self._components.values() if each.is_loaded} | set(here)
        for component in following:
            nbytes = component.nbytes + sum(each.nbytes for each in held)
            fits = self.device_budget_bytes is not None and nbytes <= self.device_budget_bytes
            if fits:
                held.add(component)
            component.load_ahead(to_device=fits)

    def _release(self, names: Any) -> None:
        """All of them, whatever fails; then raises the first failure."""
        failures: list[Exception] = []
        for name in names:
            try:
                self._components[name].release()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _release_quietly(self) -> None:
        for component in self._components.values():
            component.release_quietly()
