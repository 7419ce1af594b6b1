"""The boxes of any run of any shape are its elements, each once, in order."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from nvmeswap.zero3.checkpoint.boxes import boxes_of


@given(st.data())
def test_boxes_of_a_run_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = torch.arange(numel).view(shape)
    boxes = list(boxes_of(shape, start, stop))
    found = []
    for box in boxes:
        part = elements
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert int(part.reshape(-1)[0]) == box.start
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
