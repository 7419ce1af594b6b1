"""For trials until TensorSwapper.swap_in_many exists. To be deleted."""
from nvmeswap.swap.tensors import TensorSwapper

if not hasattr(TensorSwapper, "swap_in_many"):
    def swap_in_many(self, keys, out=None):
        futures = {k: self.swap_in_async(k, None if out is None else out[k]) for k in keys}
        return {k: f.wait() for k, f in futures.items()}
    TensorSwapper.swap_in_many = swap_in_many
