"""What is decided of parameter shards before any is moved; `nvmeswap plan` asks the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nvmeswap.memory.budget import exact_slot_classes, slot_classes
from nvmeswap.memory.pool import SlotClass
from nvmeswap.swap.shard import ShardSpec


@dataclass(frozen=True, slots=True)
class ParamPlacement:
    """Which shards go to NVMe, and how much host memory serves them.

    `min_swap_nbytes`: smaller shards stay in host memory. `buffer_count`: slots per size class.
    `largest_slot_numel`: a larger shard takes no slot; it is streamed to its destination at its
    use. `max_in_cpu`: elements kept between uses.
    """

    on_nvme: bool
    min_swap_nbytes: int
    buffer_count: int
    largest_slot_numel: int
    max_in_cpu: int

    def swaps(self, spec: ShardSpec) -> bool:
        """True if the shard's home is NVMe; empty shards have none."""
        return self.on_nvme and spec.nbytes >= max(1, self.min_swap_nbytes)

    def streams(self, spec: ShardSpec) -> bool:
        """True if the shard is too large for a slot."""
        return spec.numel > self.largest_slot_numel

    def slot_classes(self, specs: Iterable[ShardSpec]) -> list[SlotClass]:
        """Slots for `buffer_count` shards of each size in flight and `max_in_cpu` elements kept; in
        the cpu tier, one slot for every shard."""
        if not self.on_nvme:
            return exact_slot_classes([spec.nbytes for spec in specs])
        swapped = [spec for spec in specs if self.swaps(spec) and not self.streams(spec)]
        sizes = [spec.nbytes for spec in swapped]
        everything = slot_classes(sizes, count=1 << 62)
        kept_nbytes = self.max_in_cpu * max((s.dtype.itemsize for s in swapped), default=0)
        classes = []
        for wanted in reversed(everything):
            extra = min(max(0, wanted.count - self.buffer_count), kept_nbytes // wanted.nbytes)
            kept_nbytes -= extra * wanted.nbytes
            count = min(wanted.count, self.buffer_count) + extra
            classes.append(SlotClass(wanted.nbytes, count))
        return classes[::-1]
