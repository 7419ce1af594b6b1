"""Complete programs: each trains something real with nvmeswap and can prove its result."""
