"""Cases that run on the pool of ranks: imported by name there. Sizes are odd, so that shards are uneven and some
are empty.
"""

import os
import platform
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from windlass.checkpoint import restore, save
from windlass.checkpoint import shared_storage as probe
from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.index import read_tensor_index
from windlass.checkpoint.restore import read_tensors
from windlass.checkpoint.save import TensorWriter
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import BadCheckpoint, UserError
from windlass.ranks.owned_part import local_part


class Net(torch.nn.Module):
    """Two layers, a bias of three (empty on some of four ranks), and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 7, bias=True)
        self.down = torch.nn.Linear(7, 3, bias=True)
        self.back = torch.nn.Linear(3, 6, bias=False)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.down(torch.relu(self.up(self.embed(ids))))))


def make_state(sharded: bool, train_steps: int = 2) -> dict[str, torch.Tensor]:
    """Weights and AdamW state of a small net after `train_steps`, FSDP2-sharded or replicated: the same values
    either way.
    """
    torch.manual_seed(3)
    net = Net()
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for layer in (net.up, net.down, net.back):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    for step in range(train_steps):
        torch.manual_seed(step)
        ids = torch.randint(0, 11, (4, 5))
        net(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors: dict[str, torch.Tensor] = dict(net.named_parameters())
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors["tied"] = net.embed.weight
    tensors["counter"] = torch.tensor(train_steps, dtype=torch.int64)
    tensors["bf16"] = torch.arange(5, dtype=torch.bfloat16)
    return tensors


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered and detached, so that layouts can be compared."""
    whole = {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def make_checkpoints(directory: Path, asynchronous: bool = False, **settings: object) -> Checkpoints:
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    group = dist.new_group(backend="gloo") if world > 1 else None
    config = CheckpointConfig.model_validate({"async": asynchronous, **settings})
    return Checkpoints(directory, config, run_id="run", rank=rank, world=world, group=group, log=lambda sentence: None)


def save_sharded(directory: Path, asynchronous: bool) -> dict[str, torch.Tensor]:
    """Saves step 5; returns the whole state."""
    tensors = make_state(sharded=True)
    whole = full(tensors)
    checkpoints = make_checkpoints(directory, asynchronous)
    checkpoints.save(5, tensors, {"position": 17}, {"resolved.yaml": b"a: 1\n"}, metric=2.5)
    if asynchronous:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()  # what training does next must not reach the checkpoint
    checkpoints.wait()
    return whole


def load_sharded(directory: Path, sharded: bool) -> tuple[dict[str, object] | None, dict[str, torch.Tensor]]:
    """Restores into a state of other values; returns the trainer state and the whole state."""
    tensors = make_state(sharded)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(1)
    trainer_state = make_checkpoints(directory).restore(tensors)
    return trainer_state, full(tensors)


def saves_in_turn(directory: Path) -> list[int]:
    """Plans made so far, after saves of one state, of the same with other values, of one more tensor on the
    second rank, and of the first again."""
    checkpoints, planned = make_checkpoints(directory, keep_last=4), []
    state = make_state(sharded=True)
    more = {"only": torch.ones(3)} if dist.get_rank() == 1 else {}
    for step, tensors in enumerate((state, make_state(True, train_steps=3), {**state, **more}, state), 1):
        checkpoints.save(step, tensors, {}, {})
        planned.append(checkpoints._plan.times_made)
    return planned


def saves_between_failures(directory: Path) -> list[int]:
    """Plans made so far, after each save. In every other one the second rank cannot write; from the fifth on it
    holds a tensor more."""
    checkpoints, planned, tensors = make_checkpoints(directory), [], make_state(sharded=True)
    write = TensorWriter.write

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    for step in range(1, 7):
        if step == 5 and dist.get_rank() == 1:
            tensors = {**tensors, "only": torch.ones(3)}
        TensorWriter.write = fails if step % 2 and dist.get_rank() == 1 else write
        try:
            checkpoints.save(step, tensors, {}, {}, final=True)
            assert step % 2 == 0
        except OSError:
            assert step % 2
        planned.append(checkpoints._plan.times_made)
    return planned


BIG = (3072, 1024)


def big_tensor(dim: int) -> DTensor:
    """12 MiB of float32, rows or columns sharded; element (r, c) is r * 1024 + c."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(BIG[0] * BIG[1], dtype=torch.float32).view(BIG)
    return distribute_tensor(whole, mesh, [Shard(dim)])


def save_big(directory: Path) -> None:
    make_checkpoints(directory).save(1, {"big": big_tensor(0)}, {}, {})


def read_big(directory: Path, tensor: DTensor) -> int:
    checkpoint = Checkpoint.open(directory / "step-00000001")
    return read_tensors(checkpoint, {"big": tensor}, read_tensor_index(checkpoint))


def bytes_read(directory: Path) -> tuple[int, int]:
    """(bytes handed out, bytes read from storage) of this rank for its rows."""
    tensor = big_tensor(0)
    before = int(Path("/proc/self/io").read_text().split()[1])  # rchar: bytes that went through read calls
    asked = read_big(directory, tensor)
    return asked, int(Path("/proc/self/io").read_text().split()[1]) - before


def load_columns(directory: Path, block_bytes: int = restore.BLOCK_BYTES) -> bool:
    expected, tensor = big_tensor(1), big_tensor(1)
    tensor.to_local().zero_()
    most, restore.BLOCK_BYTES = restore.BLOCK_BYTES, block_bytes
    try:
        read_big(directory, tensor)
    finally:
        restore.BLOCK_BYTES = most
    return torch.equal(tensor.to_local(), expected.to_local())


def constant_state(value: float, mib: int = 1) -> dict[str, torch.Tensor]:
    """Twice `mib` MiB over all ranks in four sharded tensors, a replicated one and a counter, every element `value`."""
    world = dist.get_world_size()
    mesh, num_local = init_device_mesh("cpu", (world,)), 2 * mib * 65536 // world
    tensors: dict[str, torch.Tensor] = {
        f"shard{number}": DTensor.from_local(torch.full((num_local,), value), mesh, [Shard(0)], run_check=False)
        for number in range(4)
    }
    return {**tensors, "replicated": torch.full((1000,), value), "counter": torch.tensor(value)}


def values_of(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in local_part(tensor).unique()}


def save_values(directory: Path, steps: list[int]) -> None:
    checkpoints = make_checkpoints(directory, keep_last=5)
    for step in steps:
        checkpoints.save(step, constant_state(float(step)), {}, {})


def load_values(directory: Path) -> tuple[int, set[float]]:
    tensors = constant_state(0.0)
    trainer_state = make_checkpoints(directory).restore(tensors)
    assert trainer_state is not None
    return trainer_state["step"], values_of(tensors)


def load_while_one_cannot_open(directory: Path) -> str:
    checkpoints = make_checkpoints(directory)
    opened = os.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("rank-00001.bin"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return opened(path, *arguments, **options)

    try:
        if dist.get_rank() == 1:
            os.open = refuse
        checkpoints.restore(constant_state(0.0))
    except UserError as error:
        return "" if isinstance(error, BadCheckpoint) else str(error)
    finally:
        os.open = opened
    return ""


def save_stages(directory: Path) -> None:
    rank = dist.get_rank()
    make_checkpoints(directory).save(1, {f"stage{rank}": torch.full((5,), float(rank))}, {}, {})


def load_stages(directory: Path) -> str | None:
    """None, or what was said."""
    rank = dist.get_rank()
    tensors = {f"stage{rank}": torch.zeros(5)}
    try:
        make_checkpoints(directory).restore(tensors)
    except UserError as error:
        return error.given
    return None if values_of(tensors) == {float(rank)} else "other values"


def fail_in_background(directory: Path, surface: str) -> tuple[str, str, bool]:
    """Rank 1 cannot write step 2 in the background -> what this rank gets, and whether a retry commits."""
    checkpoints = make_checkpoints(directory, asynchronous=True)
    checkpoints.save(1, constant_state(1.0), {}, {})
    checkpoints.wait()
    writer = save.PieceWriter

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        save.PieceWriter = fail  # type: ignore[assignment, misc]
    checkpoints.save(2, constant_state(2.0), {}, {})
    while not checkpoints._has_failed:
        time.sleep(0.01)
    save.PieceWriter = writer  # type: ignore[misc]
    assert [saved.step for saved in checkpoints.poll()] == [1]  # one rank of several must not raise by itself
    try:
        checkpoints.wait() if surface == "wait" else checkpoints.save(3, constant_state(3.0), {}, {})
    except UserError as error:
        retried = checkpoints.save(2, constant_state(2.0), {}, {}, final=True)
        return type(error).__name__, str(error), retried
    return "", "", False


def save_while_training(directory: Path) -> bool:
    checkpoints = make_checkpoints(directory, asynchronous=True)
    right = True
    for step in range(1, 9):
        checkpoints.save(step, constant_state(float(step)), {}, {})
        for number in range(20):
            value = torch.tensor(float(step * number))
            dist.all_reduce(value)
            right = right and float(value) == dist.get_world_size() * step * number
    checkpoints.wait()
    return right


def probe_directories(directories: list[Path]) -> str:
    """What this rank gets when each rank has its own idea of the directory; each pretends to be a host of its
    own.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    node, patience_s = platform.node, probe.PATIENCE_S
    platform.node, probe.PATIENCE_S = lambda: f"node-{rank}", 0.2
    try:
        probe.probe_shared_storage(directories[rank], rank, world, dist.new_group(backend="gloo"))
    except UserError as error:
        return str(error)
    finally:
        platform.node, probe.PATIENCE_S = node, patience_s
    return ""


def killed_while_saving(
    directory: Path, asynchronous: bool, everyone: bool, delay_s: float | None
) -> tuple[int, float]:
    """Restores, asserts that all values are the step's, saves the next step -> (restored step, seconds of the save).

    A process of its own kills one rank, the other, or both, with SIGKILL, `delay_s` after the save has begun.
    """
    tensors = constant_state(0.0)
    checkpoints = make_checkpoints(directory, asynchronous)
    trainer_state = checkpoints.restore(tensors)
    step = trainer_state["step"] if trainer_state else 0
    assert values_of(tensors) == {float(step)}, (step, values_of(tensors))
    tensors = constant_state(float(step + 1))
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    victims = pids if everyone else [pids[step % len(pids)]]
    command = f"sleep {delay_s}; kill -9 {' '.join(map(str, victims))}"
    start_s = time.monotonic()
    killer = subprocess.Popen(["sh", "-c", command]) if delay_s is not None and dist.get_rank() == 0 else None
    checkpoints.save(step + 1, tensors, {}, {})
    checkpoints.wait()
    elapsed_s = time.monotonic() - start_s
    if killer is not None:
        killer.wait()  # no kill may reach the next trial
    dist.barrier()
    return step, elapsed_s


# ---- a run of one process without torch.distributed, for the tests of files and bytes


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    """A tensor of two pieces, small ones, a scalar, an empty one. Their values depend on the step, their sizes do
    not.
    """
    generator = torch.Generator().manual_seed(step)
    return {
        "model.big": torch.randn(1100, 1000, generator=generator),
        "model.bias": torch.randn(7, generator=generator).to(torch.bfloat16),
        "model.empty": torch.zeros(0, 3),
        "optimizer.step": torch.tensor(float(step)),
        "optimizer.mask": torch.rand(13, generator=generator) > 0.5,
    }


def make_run(run: Path, logged: list[str] | None = None, **settings: object) -> Checkpoints:
    config = CheckpointConfig.model_validate({"async": False, "keep_last": 10, **settings})
    log = (lambda sentence: None) if logged is None else logged.append
    return Checkpoints(run / "checkpoints", config, run_id="run", rank=0, world=1, group=None, log=log)


def save_steps(run: Path, *steps: int, metrics: dict[int, float] | None = None, **settings: object) -> Checkpoints:
    checkpoints = make_run(run, **settings)
    for step in steps:
        files: dict[str, bytes | Path] = {"resolved.yaml": b"seed: 1\n", "tokenizer/vocab.txt": b"a b c\n"}
        checkpoints.save(step, make_tensors(step), {"samples": 10 * step}, files, metric=(metrics or {}).get(step))
    checkpoints.wait()
    return checkpoints


def is_state_of(tensors: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(tensors[name], tensor) for name, tensor in make_tensors(step).items())


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in make_tensors(0).items()}
