"""Every structure of model and every loop trains from NVMe as it does in RAM, bit for bit."""

from __future__ import annotations

import os
from itertools import cycle
from pathlib import Path

import pytest

import tests.zero3.groupings
import tests.zero3.loops
import tests.zero3.structures  # noqa: F401
from tests.oracle import first_difference
from tests.zero3.cases import Case
from tests.zero3.programs import Program, run_in_ram, run_swapped
from tests.zero3.ranks import run_ranks

BUFFER_COUNTS = (1, 2, 3, 64)
KNOWN = [name for name, program in Program.known.items() if program.runs_on(1)]
# What depends on how the shards are cut, and on who has which.
CUT = """
    FewerElementsThanRanks FrozenBaseInInt8UnderBf16 ExpertsChosenByEachRank
    SkippedBlocksAndEarlyExit PenaltyOnTheShards ClippedByTorch
    HybridOnFour HybridWithoutAllReduceInBetween TensorParallel
""".split()
# What ranks do together in these they do in another one, too: on one rank they are in every run,
# on two with NVMESWAP_ALL_SCRIPTS=1.
BY_HAND = [] if os.environ.get("NVMESWAP_ALL_SCRIPTS") else """
    FrozenBaseInBf16 FrozenBaseInInt8 SmallAdapters InBf16 CalledRecursively RootCalledTwice
    FreedAfterForward ReentrantCheckpointAroundBlocks CheckpointInsideBlocks
    CompiledBlocks CompiledModules Accumulation AccumulationWithoutSyncInBf16 ZeroedInPlace
    EvaluationInInferenceMode InferenceModeBeforeTheFirstStep GenerationBetweenSteps
    ExceptionInForward ExceptionInEvaluation
""".split()
assert set(BY_HAND) <= set(Program.known)


@pytest.mark.parametrize("name", KNOWN)
def test_program_on_one_rank_with_one_slot_equals_ram(
    one_rank: None, tmp_path: Path, name: str
) -> None:
    """field cases N01, N02, N03, N04, D07, D08, D12, E05, P01, P02"""
    program = Program.known[name]
    difference = first_difference(run_swapped(program(), tmp_path, 1), run_in_ram(program()))
    assert difference is None


CASES = {
    2: [
        Case(bf16=False, accumulation=1, buffer_count=1),
        Case(bf16=True, accumulation=4, checkpointing=True, clip=True),
        Case(bf16=True, buffer_count=12, max_in_cpu=10**9),
        Case(bf16=True, buffer_count=1, dim=70, steps=3),  # shards that are cut
        Case(bf16=False, accumulation=4, params="cpu"),
        Case(bf16=False, checkpointing=True, optimizer="cpu", params="none"),
    ],
    3: [
        Case(bf16=False, accumulation=1, buffer_count=1),
        Case(bf16=True, accumulation=4, checkpointing=True, clip=True),
    ],
    4: [],
}


def names_on(ranks: int) -> list[str]:
    """Of programs, those that tell something new on so many ranks."""
    if ranks == 2:
        return [name for name, program in Program.known.items()
                if program.runs_on(2) and name not in BY_HAND]
    new = [name for name in CUT if Program.known[name].runs_on(ranks)]
    # An odd number cuts worse than four do.
    return [name for name in new if ranks == 3 or not Program.known[name].runs_on(3)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_runs_of_several_ranks_equal_ram(tmp_path: Path, ranks: int) -> None:
    """One launch for all, with few and many slots in turn. In the end ranks choose experts that are
    groups of their own differently: FSDP2 gathers parts of several then, without a word, and that
    is refused; the steps after it are good.
    field cases K02, N01, N02, N03, N04, N06, O01, P01, P02"""
    counts = dict(zip(names_on(ranks), cycle(BUFFER_COUNTS), strict=False))
    raised = run_ranks(ranks, "everything_equals_ram", tmp_path, cases=CASES[ranks], names=counts)
    assert raised == [["SwapUsageError"]] * ranks
