"""Each silent failure of the field, planted, is found by name; sound layouts pass."""

import torch

from tests.parallel.tiny import MODEL, batch, make_program
from windlass.errors import BadLayout
from windlass.optim.adamw import AdamW
from windlass.optim.config import OptimConfig
from windlass.parallel.invariants import check_dtypes, check_gradients, check_optimizer, check_units
from windlass.parallel.records import Record
from windlass.precision.policy import uniform


def invariant_faults():
    """Each fault planted on a built program of two ranks -> what the invariants say."""
    program = make_program(2, 3, 1, 2)
    model, records, said = program.model, program.records(), {}
    untied = make_program(2, 3, 1, 2, model={**MODEL, "tie_word_embeddings": False})

    def say(name, check, *args):
        try:
            check(*args)
        except BadLayout as error:
            said[name] = str(error)

    say("sound units", check_units, model, model.blocks, model.end, records)
    say("sound dtypes", check_dtypes, records, uniform(torch.float32))
    say("sound ends", check_units, untied.model, untied.model.blocks, untied.model.end, untied.records())
    say("ends", check_units, untied.model, untied.model.blocks, [], untied.records())
    say("units", check_units, model, model.blocks[:-1], model.end, records)
    plain = Record("model.norm.weight", torch.nn.Parameter(torch.ones(3)), torch.Size([3]))
    say("whole", check_units, model, model.blocks, model.end, [*records, plain])
    say("dtypes", check_dtypes, records, uniform(torch.bfloat16))
    say("gradients", check_gradients, records)
    before = AdamW([plain], OptimConfig())
    say("optimizer", check_optimizer, before.param_groups, records)
    say("sound optimizer", check_optimizer, AdamW(records, OptimConfig()).param_groups, records)
    return said


def test_each_invariant_finds_its_fault_and_passes_the_sound(ranks):
    said = ranks.run(2, invariant_faults)[0]
    assert set(said) == {"ends", "units", "whole", "dtypes", "gradients", "optimizer"}
    assert "4 FSDP units over 2 blocks" in said["units"]
    assert "5 FSDP units over 3 blocks" in said["ends"] and "the rest is one more: 4" in said["ends"]
    assert "1 parameters are not sharded, the first is model.norm.weight" in said["whole"]
    assert "model.embed_tokens.weight is torch.float32" in said["dtypes"]
    assert "got no gradient in the first step, the first is model.embed_tokens.weight" in said["gradients"]
    assert "the optimizer holds 1 parameters that the model does not train" in said["optimizer"]


def lost_gradient():
    """A block that is skipped: its parameters get no gradient, which the first run must find."""
    program = make_program(1, 3, 1, 1)
    program.model.blocks[1].forward = lambda hidden, *rest: hidden
    try:
        program.run([batch()], torch.tensor(8.0))
    except BadLayout as error:
        return str(error)
    return "nothing was noticed"


def test_a_parameter_without_gradient_stops_the_first_step(ranks):
    assert "the first is model.layers.1.self_attn.q_proj.weight" in ranks.run(1, lost_gradient)[0]
