"""For trials until Engine.read_many and TensorSwapper.swap_in_many exist. To be deleted."""
from nvmeswap.io.engine import Direction, Engine, Transfer
from nvmeswap.swap.tensors import TensorSwapper


class _Many:
    def __init__(self, requests): self.requests = requests
    def wait(self, timeout_s=60.0):
        for r in self.requests: r.wait(timeout_s)
    def done(self): return all(r.done() for r in self.requests)


def _many(direction):
    def start(self, file, offsets_bytes, buffers, *, lane):
        return _Many(self.submit_many([Transfer(file, direction, o, b) for o, b in zip(offsets_bytes, buffers, strict=True)], lane=lane))
    return start


if not hasattr(Engine, "read_many"):
    Engine.read_many = _many(Direction.READ)
    Engine.write_many = _many(Direction.WRITE)
if not hasattr(TensorSwapper, "swap_in_many"):
    def swap_in_many(self, keys, out=None):
        futures = {k: self.swap_in_async(k, None if out is None else out[k]) for k in keys}
        return {k: f.wait() for k, f in futures.items()}
    TensorSwapper.swap_in_many = swap_in_many
