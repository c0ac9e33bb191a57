"""What multi-rank cases share: tiny odd-sized models in Hugging Face format, uneven batches, and a layout trained on them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.adapters.config import AdapterConfig
from windlass.data.stream.collate import sample_keys
from windlass.model.architecture import Architecture
from windlass.model.chunks import Chunks
from windlass.model.config import ModelConfig
from windlass.model.hf import load_weights
from windlass.model.init import draw_block
from windlass.model.lora.adapter import adapted_shapes, adapter_of, called, is_factor
from windlass.model.names import VOCABULARY as VOCABULARY_NAMES
from windlass.model.names import Stored, stored_tensor
from windlass.model.open_config import architecture_of
from windlass.objectives.config import ObjectiveConfig
from windlass.objectives.objective import objective_of
from windlass.objectives.preference import REFERENCE
from windlass.optim.clip import gradient_norm
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.optimizer import make_optimizer
from windlass.optim.rules import assign, frozen_names
from windlass.parallel.activations import Workload, plan_recompute
from windlass.parallel.build import BuildHooks, Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh, make_silent_mesh
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.proof.proxy_adapter import low_rank
from windlass.proof.reference import Preferred, ReferenceSettings, by_matrix
from windlass.proof.reference_adapter import LowRank
from windlass.ranks.owned_part import local_part, owned_ranges

VOCABULARY = 157  # not divisible by anything; padded to 256
LENGTH = 13
SEQUENCES = 8  # of a global batch
STEPS = 3
RATES = (1e-3, 2e-3, 5e-4)
OPTIM = OptimConfig(learning_rate=1.0, max_norm=0.3, weight_decay=0.1)  # a norm that is reached in every step
HOOKS = BuildHooks(Chunks(head_logits=5 * 256))  # five tokens at a time, and a rest of fewer
SETTINGS = ReferenceSettings(RATES, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, max_norm=0.3)

PLAIN = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 9, "sliding_window": 5, "pad_token_id": None}
SIZES = {
    "qwen3": dict(
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    ),
    "llama": dict(
        hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2
    ),
    "smollm3": dict(
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1],
        pad_token_id=None,
    ),
    "qwen3_moe": dict(
        hidden_size=40,
        num_hidden_layers=3,
        intermediate_size=56,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=28,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
    ),
    "mixtral": dict(
        hidden_size=40,
        num_hidden_layers=3,
        intermediate_size=28,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=7,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
    ),
    "olmo2": {**PLAIN, "pad_token_id": None},
    "granite": {
        **PLAIN,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.6,
    },
    "phi3": {**PLAIN, "pad_token_id": None, "partial_rotary_factor": 0.6},
    "gemma3_text": {**PLAIN, **GEMMA, "sliding_window_pattern": 2},
    "gemma2": {**PLAIN, **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "olmo3": {**PLAIN, "pad_token_id": None, "sliding_window": 5, "layer_types": LAYERS},
    "starcoder2": {**PLAIN, "sliding_window": 7},
    "glm4": {**PLAIN, "pad_token_id": None, "head_dim": 12},
    "exaone4": {**PLAIN, "sliding_window": 5, "layer_types": LAYERS},
    "ernie4_5": {**PLAIN, "pad_token_id": None, "head_dim": 12},
    "cohere2": {**PLAIN, "pad_token_id": None, "sliding_window": 5, "layer_types": LAYERS, "logit_scale": 0.5},
    "gpt2": dict(
        n_embd=36, n_layer=3, n_head=3, n_positions=32, n_inner=100, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}


@dataclass(frozen=True)
class Layout:
    """A row of the matrix: how many ranks, cut how, over how many micro-batches of one sequence each."""

    world: int
    zero: int
    replicate: int
    shard: int
    micro_batch: int = 2
    recompute: str = "none"
    compile: bool = False
    policy: str = "fp64"
    packed: bool = False
    length: int = LENGTH
    sharding: tuple[tuple[str, int | bool], ...] = ()
    """More of ParallelConfig's settings."""
    optim: OptimConfig = OPTIM
    precision: tuple[tuple[str, str], ...] = ()
    """More of PrecisionConfig's settings."""
    adapter: tuple[tuple[str, Any], ...] = ()
    """AdapterConfig's settings but for its kind; none: all parameters are trained."""
    steps: int = STEPS
    objective: tuple[tuple[str, Any], ...] = ()
    """ObjectiveConfig's settings; none: next-token prediction."""


def write_model(directory: Path, family: str, tied: bool, **changes: float) -> Path:
    """A random model of transformers' own making; norms and biases are moved off 1 and 0, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, tie_word_embeddings=tied, **SIZES[family] | changes)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


def global_batches(length: int = LENGTH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One (ids, targets) per step. Masks are uneven: whole rows count nothing, others lose a step-dependent prefix."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for step in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (SEQUENCES, length + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0] = -100
        targets[1::3, : 4 + step] = -100
        targets[5, step:] = -100
        batches.append((ids[:, :-1].contiguous(), targets))
    return batches


def pair_batches(length: int = LENGTH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same for pairs: rows 2i and 2i + 1 are two answers of uneven length behind one prompt; the first pair of the first step
    counts nothing."""
    generator = torch.Generator().manual_seed(13)
    batches = []
    for step in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (SEQUENCES, length + 1), generator=generator)
        targets = ids[:, 1:].clone()
        for row in range(0, SEQUENCES, 2):
            prompt = 3 + row // 2
            ids[row + 1, :prompt] = ids[row, :prompt]
            for answer, end in ((row, 8 + row // 2), (row + 1, 10 + step)):
                targets[answer, : prompt - 1] = -100
                targets[answer, end:] = -100
        if step == 0:
            targets[:2] = -100
        batches.append((ids[:, :-1].contiguous(), targets))
    return batches


def documents(step: int, length: int = LENGTH) -> torch.Tensor:
    """[SEQUENCES, 4]: where documents begin in rows of `length`; one to four of them, of one token and more."""
    numbers = torch.arange(SEQUENCES)
    starts = torch.stack((numbers * 0, 1 + (numbers + step) % 5, 6 + numbers % 3, 9 + numbers % (2 + step)), 1)
    return torch.where(numbers[:, None] % 4 < torch.arange(4), length, starts)


def positions(step: int, length: int = LENGTH) -> torch.Tensor:
    """[SEQUENCES, length]: places in their documents, written out, apart from what the model does with its borders."""
    rows = []
    for starts in documents(step, length).tolist():
        spans = zip(starts, [*starts[1:], length], strict=True)
        rows.append([place - start for start, end in spans for place in range(start, end)])
    return torch.tensor(rows)


def packed_batches(length: int = LENGTH) -> list[tuple[torch.Tensor, ...]]:
    """The global batches for a reference that is to see documents apart: ids, targets, positions."""
    return [(*batch, positions(step, length)) for step, batch in enumerate(global_batches(length))]


def keys_of(step: int, mine: slice) -> torch.Tensor:
    """As the loader gives them: by the places of these samples in the stream."""
    return sample_keys(3, step * SEQUENCES + mine.start, mine.stop - mine.start)


def factor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A whole factor to begin with, B's not 0: else the gradients of A were."""
    return draw_block(f"7/{name}", 0)[: math.prod(shape)].view(shape) * 0.1


def fill(named: dict[str, torch.Tensor], directory: str, architecture: Architecture) -> None:
    """The base from its files, and each rank's part of the factors."""
    load_weights(directory, architecture, {name: tensor for name, tensor in named.items() if not is_factor(name)})
    for name, tensor in named.items():
        if is_factor(name):
            index = tuple(slice(part.start, part.stop) for part in owned_ranges(tensor))
            local_part(tensor).copy_(factor(name, tuple(tensor.shape))[index])


def reference_adapter(directory: str, settings: dict[str, Any]) -> LowRank:
    """The same adapter for the reference."""
    architecture = architecture_of(ModelConfig.model_validate({"from": directory}))
    config = AdapterConfig(kind="lora", **settings)
    adapter = adapter_of(config, architecture)
    shapes = adapted_shapes(architecture, adapter)
    values = {name: factor(name, shape) for name, shape in shapes.items() if is_factor(name)}
    return low_rank(config, architecture, adapter, values)


def reference_preference(settings: dict[str, Any]) -> Preferred:
    """The same objective for the reference."""
    names = {"loss": "loss", "beta": "beta", "label_smoothing": "smoothing", "target_margin": "target"}
    given = {names[name]: value for name, value in settings.items() if name != "kind"}
    return Preferred(**{"loss": "sigmoid", "beta": 0.1, "smoothing": 0.0, "target": 0.5} | given)


def train_layout(directory: str, case: Layout) -> dict:
    """On one of `case.world` ranks: the same steps through build_program, clip and AdamW. fp64 gathers no moments."""
    if case.compile:  # as a new process: other models that this one compiled count towards dynamo's limit
        torch._dynamo.reset()
    parallel = ParallelConfig(
        zero=case.zero,
        replicate=case.replicate,
        shard=case.shard,
        recompute=case.recompute,
        compile=case.compile,
        **dict(case.sharding),
    )
    chosen = PrecisionConfig(policy=case.policy, **dict(case.precision))
    precision = precision_of(chosen)
    architecture = architecture_of(ModelConfig.model_validate({"from": directory}))
    adapter = adapter_of(AdapterConfig(kind="lora", **dict(case.adapter)), architecture) if case.adapter else None
    rules = assign(case.optim.groups, called(architecture, adapter))
    mesh = make_mesh(parallel.layout(case.world), "cpu")
    silent = make_silent_mesh(mesh.layout, "cpu") if parallel.activation_gib else None
    shape_BT, num_micro = (case.micro_batch, case.length), SEQUENCES // mesh.layout.batch_ranks // case.micro_batch
    work = Workload(architecture, parallel, precision, "cpu", shape_BT, frozen_names(rules), adapter, num_micro)
    kinds = plan_recompute(work, silent).kinds
    assert parallel.activation_gib is None or len(set(kinds)) > 1, (
        "the budget chooses one kind for all blocks",
        kinds,
    )
    program = build_program(
        architecture,
        Parallelism(parallel, precision, mesh, torch.device("cpu")),
        lambda named: fill(named, directory, architecture),
        frozen_names(rules),
        hooks=HOOKS,
        recompute=kinds,
        adapter=adapter,
    )
    states = precision.states if chosen.is_rounded else None
    storage = Storage(states, precision.is_stochastic, seed=3, gradients=precision.gradients)
    optimizer = make_optimizer(program.records(), case.optim, rules, precision.compute, storage)
    losses, norms, evaluations, figures, gradients = [], [], [], [], {}
    per_rank = SEQUENCES // mesh.layout.batch_ranks
    objective = objective_of(ObjectiveConfig.model_validate(dict(case.objective)))
    kept: list[torch.Tensor] = []
    given = (pair_batches if case.objective else global_batches)(case.length)[: case.steps]
    if case.objective and adapter is None:  # what an adapter's base is at any time is gone after step 0 without one
        for ids, targets in given:
            mine = slice(mesh.batch_rank * per_rank, (mesh.batch_rank + 1) * per_rank)
            kept.append(program.score([{"input_ids": ids[mine], "targets": targets[mine]}]).double())
    for step, (ids, targets) in enumerate(given):
        mine = slice(mesh.batch_rank * per_rank, (mesh.batch_rank + 1) * per_rank)
        micro = case.micro_batch
        batches = [{"input_ids": i, "targets": t} for i, t in zip(ids[mine].split(micro), targets[mine].split(micro))]
        if case.packed:
            for batch, starts in zip(batches, documents(step, case.length)[mine].split(micro), strict=True):
                batch["documents"] = starts
        if architecture.dropout or (adapter is not None and adapter.dropout):
            for batch, keys in zip(batches, keys_of(step, mine).split(micro), strict=True):
                batch["keys"] = keys
        if kept:
            for batch, scores in zip(batches, kept[step].split(micro), strict=True):
                batch[REFERENCE] = scores
        optimizer.set_learning_rate(RATES[step])
        weighed, count = objective.weigh(batches, program)
        losses.append(program.run(weighed, count).item())
        figures.append({name: value.tolist() for name, value in program.figures().items()})
        rewards = {name: value.item() for name, value in objective.figures().items()}
        if step == 0:
            graded = [record for record in program.records() if record.counted and record.tensor.grad is not None]
            gradients = {record.name: full(record.tensor.grad).clone() for record in graded}
        norm = gradient_norm(program.records(), mesh.pp_group)
        norms.append(norm.item())
        dtypes = {"gradients": {str(g.dtype) for r in program.records() if (g := r.tensor.grad) is not None}}
        optimizer.step(norm)
        program.adapt(norm)
        scored = [{name: tensor for name, tensor in batch.items() if name != "keys"} for batch in batches]
        weighed = objective.weigh(scored, program)[0]
        for batch, one in zip(batches, weighed, strict=True):  # evaluation has to leave the masks out by itself
            one.update({"keys": batch["keys"]} if "keys" in batch else {})
        evaluations.append((program.evaluate(weighed) / count).item())
    weights = {record.name: full(record.tensor.detach()) for record in program.records() if record.kept}
    dtypes["weights"] = {str(record.tensor.dtype) for record in program.records() if record.kept}
    base = {record.name: full(record.tensor).detach() for record in program.records() if not record.kept}
    moments = {name: value for name, value in optimizer.state_tensors().items() if "exp_avg" in name}
    dtypes["moments"] = {str(value.dtype) for value in moments.values()}
    return {
        "losses": losses,
        "norms": norms,
        "evaluations": evaluations,
        "figures": figures,
        "gradients": gradients,
        "weights": weights,
        "moments": {name: full(value) for name, value in moments.items() if case.policy != "fp64"},
        "dtypes": dtypes,
        "base": base,
        "rewards": rewards,
    }


def assert_same_tensors(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], directory: Path, tolerance: float
) -> None:
    """By our names and by Hugging Face's: every tensor, to `tolerance` of its largest element (of 1/1000 of the model's largest
    where that is more). Padded rows are 0."""
    architecture = architecture_of(ModelConfig.model_validate({"from": str(directory)}))
    theirs = by_matrix(theirs)
    scale = 1e-3 * max(float(tensor.abs().max()) for tensor in theirs.values())
    compared = set()
    for name, tensor in ours.items():
        where = Stored(name) if is_factor(name) else stored_tensor(name, architecture)
        rows = architecture.vocab_size if name in VOCABULARY_NAMES else tensor.shape[0]
        assert not tensor[rows:].any(), name
        whole = theirs[where.name].T if where.transposed else theirs[where.name]
        expected = whole[where.first : where.first + rows]
        worst = float((tensor[:rows] - expected).abs().max()) / max(float(expected.abs().max()), scale)
        assert worst <= tolerance, (name, worst)
        compared.add(where.name)
    assert compared == theirs.keys(), compared ^ theirs.keys()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a sharded one."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
