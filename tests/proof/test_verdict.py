"""What is printed of a verdict: the first difference, the tensor after it, and one sentence at the end."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from windlass.parallel.config import ParallelConfig
from windlass.proof.compare import ProofRow
from windlass.proof.fold_layout import fold_onto_ranks
from windlass.proof.verdict import Verdict, conclude, print_verdict

AGREES = ProofRow("loss", "3 steps", 0.0, 1e-10)
DIFFERS = ProofRow("resumed: loss", "2 steps", 0.5, 1e-10, "step 2 on rank 0: 3.0, one process has 2.0")
TENSOR = replace(DIFFERS, what="resumed: weights", where="model.layers.1.self_attn.k_proj.weight[0, 1] on rank 1: 2.0")
(CELL,) = fold_onto_ranks(ParallelConfig(shard=2), None, 8).cells


def printed(function, *given):
    console = Console(file=io.StringIO(), width=200)
    function(*given, console)
    return console.file.getvalue()


def test_a_run_that_resumes_wrongly_names_the_tensor():
    shown = printed(print_verdict, Verdict(CELL, [AGREES, DIFFERS, TENSOR]))
    assert f"first difference: resumed: loss: {DIFFERS.where}\nand then: resumed: weights: {TENSOR.where}\n" in shown


def test_a_tensor_that_is_the_first_difference_is_printed_once():
    shown = printed(print_verdict, Verdict(CELL, [AGREES, TENSOR, DIFFERS]))
    assert shown.count(TENSOR.where) == 1 and "and then" not in shown


@pytest.mark.parametrize(("verdicts", "sentence"), [
    ([Verdict(CELL, [AGREES])], "proved: 1 of 1 layout trains what one process trains"),
    ([Verdict(CELL, [AGREES]), Verdict(CELL, [DIFFERS])], "not equal: 1 of 2 layouts trains something else than one process"),
    (
        [Verdict(CELL, [DIFFERS]), Verdict(CELL, failed="rank 1")],
        "not equal: 1 of 2 layouts trains something else than one process, and 1 ended because a rank failed",
    ),
    ([Verdict(CELL, failed="rank 1")], "not proved: 1 of 1 layout ended because a rank failed"),
    ([Verdict(CELL, [AGREES]), *[Verdict(CELL, failed="rank 1")] * 2], "not proved: 2 of 3 layouts ended because a rank failed"),
])  # fmt: skip
def test_the_last_line_is_a_sentence(verdicts, sentence):
    assert printed(conclude, verdicts, ["sizes"]) == f"not proved:\n  - sizes\n{sentence}\n"
