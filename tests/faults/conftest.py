"""What the tests of the I/O floor use is at hand here too."""

from tests.io.conftest import random_bytes, swap_path

__all__ = ["random_bytes", "swap_path"]
