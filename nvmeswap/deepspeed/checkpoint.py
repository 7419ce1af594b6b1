"""DeepSpeed's checkpoint of swapped states: it copies the swap folder, and copies it back.

A copy has what the files lack in nvmeswap_optimizer.json (numbers of one version in `format`):

    {"format": 1, "sub_groups": {"0_1": {"numel": 524289,
        "master": {"dtype": "float32", "digest": "9c5a..."},
        "states": {"exp_avg": {"dtype": "float32", "digest": "07b1..."}},
        "values": {"step": {"dtype": "float32", "shape": [], "elements": [5.0]}}}},
     "param_groups": [{"lr": 0.001, "betas": [0.9, 0.999]}]}

`digest` is the xxh3_64 of the tensor's bytes, which are the first of its file; `values` are the
states that are not swapped, tensors or plain numbers; `param_groups` are the optimizer's, without
its parameters: DeepSpeed restores a scheduler, which sets its rate only after the next step. A
reader must refuse another format number.

Whether something was copied in is seen by the files' times: those that we leave are to the
nanosecond when the folder was asked for, and no copy has the same.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvmeswap.deepspeed.raw_files import read_raw
from nvmeswap.deepspeed.sub_group import Place, SubGroup, TensorContent, file_name_of
from nvmeswap.deepspeed.traffic import Traffic
from nvmeswap.errors import SwapChecksumError, SwapManifestError, SwapWriteError
from nvmeswap.io.digest import digest
from nvmeswap.store.owner import OWNER_FILE, SIDECAR_FILE

_FORMAT = 1
_MOST_ELEMENTS = 4096  # arbitrary: of a tensor in the JSON
_OTHER_CHECKPOINT_FIX = "load a checkpoint of this model, at the same number of ranks"
_DAMAGED_FIX = "copy the checkpoint again, or load another one"

States = MutableMapping[torch.Tensor, dict[str, Any]]  # an optimizer's
_Mark = tuple[int, int, int]  # of a file: when it was changed, its size, and which it is


class _Copy(NamedTuple):
    """A tensor in the checkpoint: its name there, and its digest if it is known."""

    key: str
    digest: str | None = None


class CheckpointFolder:
    """The swap folder as DeepSpeed's checkpoint sees it.

    Threads: one at a time. Blocking: yes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = (folder / OWNER_FILE).read_bytes()
        self._marks: dict[str, _Mark] = {}

    @property
    def is_published(self) -> bool:
        """Whether there may be something to take in."""
        return bool(self._marks)

    def publish(self, groups: Iterable[SubGroup], optimizer: torch.optim.Optimizer) -> None:
        """All is in the files: adds what they lack. Raises SwapWriteError."""
        content = {
            "format": _FORMAT,
            "sub_groups": {group.id: _group_to_json(group, optimizer.state) for group in groups},
            "param_groups": [_settings_to_json(each) for each in optimizer.param_groups],
        }
        self._save(json.dumps(content))
        self._marks = {}
        for name in self._names():
            now_ns = time.time_ns()
            os.utime(self._folder / name, ns=(now_ns, now_ns))
            self._marks[name] = _mark(self._folder / name)

    def take_in(
        self,
        groups: Mapping[str, SubGroup],
        optimizer: torch.optim.Optimizer,
        traffic: Traffic,
    ) -> None:
        """Where a checkpoint was copied into the folder meanwhile, it becomes what the sub-groups
        are. Raises SwapManifestError, SwapChecksumError, SwapReadError, each time until all is
        taken; SwapSpaceError, SwapWriteError."""
        arrived = {
            name for name in self._names() if _mark(self._folder / name) != self._marks.get(name)
        }
        if arrived:
            # It is another owner's now; ours is still locked, and says to people who we are.
            (self._folder / OWNER_FILE).write_bytes(self._owner)
            if SIDECAR_FILE in arrived:
                try:
                    self._take_saved(groups, optimizer, traffic)
                except (KeyError, TypeError, AttributeError, ValueError) as error:
                    raise self._unreadable(f"{type(error).__name__}: {error}") from error
            else:
                self._take_bare(groups, optimizer.state, traffic, arrived)
            traffic.wait_for_writes()
            for name in arrived - {SIDECAR_FILE}:
                if not traffic.has_file(name):  # nobody's; it would be in the way of a new file
                    (self._folder / name).unlink(missing_ok=True)
        self._marks = {}

    # --- a copy of ours --------------------------------------------------------------------------

    def _take_saved(
        self,
        groups: Mapping[str, SubGroup],
        optimizer: torch.optim.Optimizer,
        traffic: Traffic,
    ) -> None:
        content = json.loads((self._folder / SIDECAR_FILE).read_text())
        if content["format"] != _FORMAT:
            raise self._unreadable(f"its format is {content['format']}, not {_FORMAT}")
        saved, settings = content["sub_groups"], content["param_groups"]
        if len(settings) != len(optimizer.param_groups):
            here = len(optimizer.param_groups)
            raise self._differs("number of param_groups", len(settings), here)
        pairs = self._pair(saved, groups)
        for saved_id, group in pairs:
            if saved[saved_id]["numel"] != group.numel:
                numel = saved[saved_id]["numel"]
                raise self._differs(f"numel of {saved_id}", numel, group.numel)
        for saved_id, group in pairs:
            facts = saved[saved_id]
            traffic.discard(group)
            self._take_states(group, facts, optimizer.state)
            copies = {group.id: _Copy(saved_id, facts["master"]["digest"])}
            for name, state in facts["states"].items():
                copies[group.states[name].key] = _Copy(f"{name}-{saved_id}", state["digest"])
            self._take_files(group, copies, traffic)
        for mine, theirs in zip(optimizer.param_groups, settings, strict=True):
            mine.update({name: _like(mine.get(name), value) for name, value in theirs.items()})

    def _pair(
        self, saved: Mapping[str, Any], groups: Mapping[str, SubGroup]
    ) -> list[tuple[str, SubGroup]]:
        """By name, or in order: DeepSpeed counts parameters on from one model of a process to the
        next, so the same model has other names there."""
        if saved.keys() == groups.keys():
            return list(groups.items())
        if len(saved) != len(groups) or saved.keys() & groups.keys():
            raise self._differs("sub_groups", sorted(saved), sorted(groups))
        here = sorted(groups.values(), key=lambda group: _first_number(group.id))
        return list(zip(sorted(saved, key=_first_number), here, strict=True))

    def _take_states(self, group: SubGroup, facts: Mapping[str, Any], states: States) -> None:
        """The optimizer has the states that were saved, swapped ones empty."""
        values = states.setdefault(group.parameter, {})
        if gone := group.states.keys() - facts["states"].keys():
            values.clear()  # what an optimizer keeps beside these is worth nothing without them
            for name in gone:
                del group.states[name]
            values.update({name: content.tensor for name, content in group.states.items()})
        self._check_dtype(group.master, facts["master"])
        for name, state in facts["states"].items():
            if name not in group.states:
                values[name] = torch.empty(0, dtype=getattr(torch, state["dtype"]), device="cpu")
                key = f"{name}-{group.id}"
                group.states[name] = TensorContent(key, group.numel, values[name])
            self._check_dtype(group.states[name], state)
        values.update({name: _from_json(value) for name, value in facts["values"].items()})
        if not values:
            del states[group.parameter]

    # --- a copy of DeepSpeed's -------------------------------------------------------------------

    def _take_bare(
        self,
        groups: Mapping[str, SubGroup],
        states: States,
        traffic: Traffic,
        arrived: set[str],
    ) -> None:
        """Files alone: states count where the optimizer has them, for its step is not in a file."""
        lost_count = 0
        for group in groups.values():
            if group.master.file_name not in arrived:
                raise self._differs("sub_groups", sorted(arrived), group.master.file_name)
            traffic.discard(group)
            mine = {content.file_name for content in group.states.values()}
            theirs = {name for name in arrived if name.endswith(f"-{group.master.file_name}")}
            if mine != theirs:
                group.states.clear()
                states.pop(group.parameter, None)
                lost_count += 1
            self._take_files(group, {}, traffic)
        if lost_count:
            warnings.warn(
                f"the checkpoint copied to {self._folder} has no {SIDECAR_FILE}, so the states "
                f"of {lost_count} sub-groups can't be told: masters are as saved, and the "
                "optimizer's states start from zero",
                stacklevel=5,
            )

    # --- files -----------------------------------------------------------------------------------

    def _take_files(
        self, group: SubGroup, copies: Mapping[str, _Copy], traffic: Traffic
    ) -> None:
        """Reads what was copied, and writes it as our own."""
        try:
            for content in group.contents:
                traffic.fill(group, content)
                self._read(content, copies.get(content.key) or _Copy(content.key))
        except BaseException:
            traffic.discard(group)
            raise
        for content in group.contents:
            if not traffic.has_file(content.file_name):
                (self._folder / content.file_name).unlink(missing_ok=True)
        group.place = Place.KEPT
        traffic.depart(group, wait=False)

    def _read(self, content: TensorContent, copy: _Copy) -> None:
        path = self._folder / file_name_of(copy.key)
        nbytes = path.stat().st_size if path.exists() else 0
        if nbytes < content.nbytes:
            raise SwapManifestError(
                f'"{content.key}" has {content.nbytes:_} bytes, its file {nbytes:_}',
                field="nbytes", path=path, fix=_DAMAGED_FIX,
            )
        assert content.memory is not None
        read_raw(path, content.dtype, content.memory)
        content.is_stored = False
        got = f"{digest(content.memory):016x}"
        if copy.digest not in (None, got):
            raise SwapChecksumError(
                f'"{content.key}" is not what was saved', path=path, wanted_nbytes=content.nbytes,
                cause=f"xxh3_64 expected {copy.digest}, got {got}", fix=_DAMAGED_FIX,
            )

    def _check_dtype(self, content: TensorContent, saved: Mapping[str, str]) -> None:
        here = _name_of(content.dtype)
        if here != saved["dtype"]:
            raise self._differs(f"dtype of {content.key}", saved["dtype"], here)

    def _names(self) -> list[str]:
        """The files that a checkpoint consists of."""
        return [
            name
            for name in os.listdir(self._folder)
            if name == SIDECAR_FILE or (name.endswith(".swp") and "gradient" not in name)
        ]

    def _save(self, text: str) -> None:
        path = self._folder / SIDECAR_FILE
        partial = path.with_suffix(".partial")
        try:
            partial.unlink(missing_ok=True)
            with open(partial, "x", opener=_open_private) as file:
                file.write(text)
            partial.replace(path)
        except OSError as error:
            raise SwapWriteError(
                "the states' description can't be written", path=path, errno=error.errno,
                intact="all states", fix="free space there",
            ) from error

    def _unreadable(self, what: str) -> SwapManifestError:
        return SwapManifestError(
            f"the states' description can't be read ({what})", field="format",
            path=self._folder / SIDECAR_FILE, fix=_DAMAGED_FIX,
        )

    def _differs(self, field: str, saved: object, here: object) -> SwapManifestError:
        return SwapManifestError(
            f"the checkpoint is of something else: {field} saved {saved}, here {here}",
            field=field, path=self._folder / SIDECAR_FILE, fix=_OTHER_CHECKPOINT_FIX,
        )


def _first_number(group_id: str) -> int:
    """Of its first parameter: sub-groups in the model's order, whatever order they are made in."""
    return int(group_id.split("_")[0])


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _mark(path: Path) -> _Mark:
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _group_to_json(group: SubGroup, states: States) -> dict[str, Any]:
    values = states.get(group.parameter, {})
    others = {name: value for name, value in values.items() if name not in group.states}
    return {
        "numel": group.numel,
        "master": _content_to_json(group.master),
        "states": {name: _content_to_json(content) for name, content in group.states.items()},
        "values": {
            name: _to_json(value) for name, value in others.items() if _is_told(name, value)
        },
    }


def _settings_to_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a parameter group that JSON can tell; others stay what they are."""
    return {
        name: _to_json(value)
        for name, value in settings.items()
        if name != "params" and (isinstance(value, torch.Tensor) or _is_plain(value))
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _like(mine: object, saved: Any) -> Any:
    """The saved setting, in the type that the optimizer has it in."""
    return tuple(saved) if isinstance(mine, tuple) else _from_json(saved)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _content_to_json(content: TensorContent) -> dict[str, str]:
    assert content.is_stored and content.digest is not None
    return {"dtype": _name_of(content.dtype), "digest": f"{content.digest:016x}"}


def _is_told(name: str, value: object) -> bool:
    if isinstance(value, torch.Tensor):
        told = value.numel() <= _MOST_ELEMENTS and not value.is_complex()
    else:
        told = value is None or isinstance(value, bool | int | float | str)
    if not told:
        warnings.warn(
            f'the optimizer\'s state "{name}" is kept in memory and will not be in the checkpoint',
            stacklevel=6,
        )
    return told


def _to_json(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return {
        "dtype": _name_of(value.dtype),
        "shape": list(value.shape),
        "elements": value.detach().flatten().tolist(),
    }


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    elements = torch.tensor(value["elements"], dtype=getattr(torch, value["dtype"]), device="cpu")
    return elements.reshape(value["shape"])
