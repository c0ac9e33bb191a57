"""What tests of resuming share: recipes by name, runs that nobody interrupted, and checkpoints carried from layout to layout."""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests import tiny
from tests.proof.matrix import layout_of
from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.keep import Difference, diff
from windlass.config import check_recipe
from windlass.model.config import architecture_from_hf
from windlass.model.lora.adapter import adapter_of
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.mesh import make_mesh
from windlass.precision import loss_scale
from windlass.precision.policy import precision_of
from windlass.training.parts.open_program import optimizer_of
from windlass.training.start.open_saved import read_trainer_state
from windlass.training.start.restore import state_tensors

HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
}  # 18 channels a rank: uneven over 4
GPT2 = {
    **dict.fromkeys(tiny.QWEN3_KEYS),
    "family": "gpt2",
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
EXPERTS = {
    "family": "qwen3_moe",
    "intermediate_size": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
}
SIXTEENS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
GROUPS = [
    {"names": ["lm_head.weight", "model.layers.0.*"], "frozen": True},
    {"names": ["*norm*"], "learning_rate_scale": 0.5, "weight_decay": 0.01},
]
SETTINGS = {
    "fused": {},
    "foreach": {"optim": {"kernel": "foreach"}},
    "dropout": {"model": GPT2},
    "muon and groups": {"optim": {"kind": "muon", "groups": GROUPS}, "checkpoint": {"keep_steps": [0]}},
    "bf16": {"precision": {"policy": "bf16"}},
    "fp16": {"precision": {"policy": "fp16"}},
    "bf16-pure": {"precision": {"policy": "bf16-pure"}},
    "bf16 states": {"precision": {"policy": "bf16", "states": "bf16"}},
    "fp8": {"precision": {"policy": "fp8"}, "model": SIXTEENS},
    "heads": {"model": HEADS},
    "bf16 heads": {"model": HEADS, "precision": {"policy": "bf16"}},
    "documents": {"model": HEADS, "data": {"packing": "best-fit", "isolate": True}},
    "experts": {"model": EXPERTS},
    "deep": {"model": {"num_hidden_layers": 5}},  # stages are unequal
}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}
PAIRS = {"run": {"tokens_per_step": 24 * 8, "micro_batch": 2}, "objective": {"kind": "dpo", "beta": 0.5}}
BESIDE_A_BASE = {  # in fp64: on another layout to 1e-10
    "lora": {"adapter": LORA},
    "nf4": {"adapter": {**LORA, "base": "nf4"}},
    "dpo": PAIRS,
    "lora dpo": {"adapter": LORA, **PAIRS},
}


def parallel_of(words: str) -> tuple[int, dict]:
    """The ranks, and a recipe's section, of a layout in the words of the matrix."""
    layout = layout_of("", words)
    plain = {key: getattr(layout, key) for key in ("zero", "replicate", "shard", "recompute", "compile")}
    return layout.world, {**plain, **dict(layout.sharding)}


def recipe(base: Path, name: str, settings: str, layout: str, **more: dict):
    """The tiny recipe with these settings; each kind of data is prepared once."""
    sections = {**(BESIDE_A_BASE if settings in BESIDE_A_BASE else SETTINGS)[settings], **more}
    kind = "documents" if settings == "documents" else "pairs" if "dpo" in settings else "data"
    if settings in BESIDE_A_BASE:
        if not (base / "base").exists():
            tiny.write_base(base / "base")
            tiny.write_pairs(base / "pairs.jsonl")
        sections |= {
            "model": dict.fromkeys(tiny.MODEL) | {"from": str(base / "base")},
            "precision": {"policy": "fp64"},
        }
        if "dpo" in settings:
            sections["data"] = {
                "sources": [{"path": str(base / "pairs.jsonl"), "format": "preference"}],
                "sequence_length": 24,
            }
    sections["data"] = {**sections.get("data", {}), "directory": str(base / kind)}
    return tiny.recipe(base, name, parallel=parallel_of(layout)[1], **sections)


def train(config, kill=None):
    """On a rank: with a loss scale that overflows at first, and grows every third good step."""
    scale = mock.patch.multiple(loss_scale, FIRST_SCALE=2.0**20, GROWTH_STEPS=3)
    with scale:
        return tiny.train(config, kill)


class Runs:
    """Runs that nobody interrupted, each trained once."""

    def __init__(self, base: Path, ranks):
        self.base, self._ranks, self._made = base, ranks, {}

    def whole(self, settings: str, layout: str):
        """(its config, the result of each rank)"""
        key = settings, layout
        if key not in self._made:
            config = recipe(self.base, f"whole {settings} {layout}", settings, layout)
            self._made[key] = config, self._ranks.run(parallel_of(layout)[0], train, config)
        return self._made[key]


def checkpoint(directory: Path, step: int = tiny.STEPS) -> Path:
    return directory / "checkpoints" / f"step-{step:08d}"


def assert_every_byte(one: Path, two: Path, what: object = "") -> None:
    difference = diff(one, two)
    assert difference == Difference(same=difference.same) and difference.same > 0, (what, difference)


def assert_close(one: Path, two: Path, tolerance: float = 1e-5, norm_tolerance: float = 1e-5) -> None:
    """The losses and norms of two runs; and checkpoints of the same names, shapes and dtypes."""
    expected, got = tiny.losses(one), tiny.losses(two)
    assert got.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert abs(got[step][0] - loss) <= tolerance and abs(got[step][1] - norm) <= norm_tolerance, step
    difference = diff(checkpoint(one), checkpoint(two))
    assert (difference.only_first, difference.only_second, difference.form) == ([], [], []), difference
    assert difference.same + len(difference.bytes) > 20


def carry(source: Path, target: Path, tree: dict, world: int, parallel: dict) -> None:
    """On one of `world` ranks: reads a checkpoint into a layout and writes it out of it, without a step."""
    config = check_recipe({**tree, "parallel": parallel})
    mesh, precision = make_mesh(config.parallel.layout(world), "cpu"), precision_of(config.precision)
    trainer_state = read_trainer_state(source)
    architecture = architecture_from_hf(trainer_state["model"])
    parallelism = Parallelism(config.parallel, precision, mesh, torch.device("cpu"))
    adapter = adapter_of(config.adapter, architecture)
    program = build_program(architecture, parallelism, lambda named: None, adapter=adapter)
    optimizer = optimizer_of(config, program, {}, precision)
    state = state_tensors(program, optimizer)
    group = dist.new_group(backend="gloo") if world > 1 else None
    checkpoints = Checkpoints(
        target, config.checkpoint, run_id="ring", rank=dist.get_rank(), world=world, group=group, log=print
    )
    checkpoints.restore_from(source, state, what="all")
    beside = [source / "resolved.yaml", source / "provenance.json", *(source / "tokenizer").iterdir()]
    checkpoints.save(1, state, trainer_state, {str(path.relative_to(source)): path for path in beside}, final=True)
    checkpoints.wait()


def around(ranks, config, target: Path, ring: list[str]) -> None:
    """The last checkpoint of a run, carried through the layouts of `ring`: after each every byte is the first one's."""
    first = source = checkpoint(config.run.directory)
    for number, layout in enumerate(ring):
        world, parallel = parallel_of(layout)
        place = target / str(number) / "checkpoints"
        ranks.run(world, carry, source, place, config.model_dump(mode="json", by_alias=True), world, parallel)
        source = place / "step-00000001"
        assert_every_byte(first, source, layout)
