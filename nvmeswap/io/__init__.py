"""How bytes move: engine, requests, probe, alignment.

    folder = probe_folder(path)                 # what works there
    with Engine(backend=folder.backend) as engine:
        file = engine.open(path / "a.swp")
        engine.write(file, 0, tensor).wait()
"""

from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.drives import probe_folders
from nvmeswap.io.engine import Engine
from nvmeswap.io.file import DirectMode, File, Member, Stripes
from nvmeswap.io.filesystem import BufferedFallbackWarning, FilesystemWarning
from nvmeswap.io.probe import Drive, FolderProbe, Refusal, probe_folder
from nvmeswap.io.request import Request
from nvmeswap.io.transfer import Direction, Lane

__all__ = [
    "BufferedFallbackWarning",
    "DirectMode",
    "Direction",
    "Drive",
    "Engine",
    "File",
    "FilesystemWarning",
    "FolderProbe",
    "Lane",
    "Member",
    "Refusal",
    "Request",
    "Stripes",
    "padded_nbytes",
    "probe_folder",
    "probe_folders",
]
