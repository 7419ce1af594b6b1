"""Optimizer state is cut so that every element is in one sub-group, once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.swap.master import MasterRest
from nvmeswap.swap.sub_group import (
    SEGMENT_GRAIN_NUMEL,
    MasterForm,
    StateItem,
    SubGroupLayout,
    cut_into_sub_groups,
)

STATES = ("exp_avg", "exp_avg_sq")
FORMS = st.sampled_from(list(MasterForm))
STATE_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
DTYPES = st.sampled_from([None, torch.bfloat16, torch.float16])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50_000), FORMS, STATE_DTYPES, DTYPES), max_size=12),
    st.integers(1, 100_000),
)
def test_cut_for_any_sizes_covers_each_element_once(
    shards: list[tuple[int, MasterForm, torch.dtype, torch.dtype | None]], sub_group_numel: int
) -> None:
    """Else some parameters would silently not be trained, or twice.  field case D01"""
    items = [
        StateItem(f"p{i}", n, form, STATES, state_dtype, dtype)
        for i, (n, form, state_dtype, dtype) in enumerate(shards)
    ]
    layouts = cut_into_sub_groups(items, sub_group_numel)
    covered: dict[str, list[tuple[int, int]]] = {item.key: [] for item in items}
    for layout in layouts:
        assert layout.segments
        numel = sum(segment.numel for segment in layout.segments)
        assert numel <= max(sub_group_numel, SEGMENT_GRAIN_NUMEL)
        _assert_regions_are_apart(layout)
        for segment in layout.segments:
            assert segment.start % SEGMENT_GRAIN_NUMEL == 0
            covered[segment.key].append((segment.start, segment.stop))
    for item in items:
        end = 0
        for start, stop in covered[item.key]:
            assert start == end and stop > start
            end = stop
        assert end == item.numel


def _assert_regions_are_apart(layout: SubGroupLayout) -> None:
    """Writing each region in full must disturb no other, and stay in the slot."""
    memory = torch.zeros(layout.slot_nbytes, dtype=torch.uint8)
    regions = []
    for segment in layout.segments:
        states = [segment.state(memory, name) for name in STATES]
        assert all(s.data_ptr() - memory.data_ptr() >= layout.masters_nbytes for s in states)
        masters = []
        if segment.item.master is MasterForm.WHOLE:
            masters = [segment.master(memory)]
        elif segment.item.master is MasterForm.SPLIT:
            begin = segment.master_offset_bytes
            masters = [memory[begin : begin + MasterRest.nbytes_for(segment.numel)]]
        regions += states + masters
        output = segment.output(memory)
        if output is not None:
            regions.append(output)
            assert output.numel() == segment.numel
            begin = output.data_ptr() - memory.data_ptr()
            assert begin >= layout.state_nbytes
    spans = sorted((r.data_ptr(), r.data_ptr() + r.nbytes) for r in regions)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    assert spans[-1][1] <= memory.data_ptr() + memory.numel()
