"""Sums over ranks, the norm, what an optimizer steps: DDP and FSDP."""

from tests.proof.bugs.bug import Bug, Seen

DDP, CLIP, PROGRAM, MESH = "parallel/ddp.py", "optim/clip.py", "parallel/program.py", "parallel/mesh.py"
FSDP, ADAMW, GROUPS, MUON = "parallel/fsdp.py", "optim/adamw.py", "optim/groups.py", "optim/muon.py"

# fmt: off
# ruff: noqa: E501  texts of the source, whole lines of it
DATA_PARALLEL = {
    "mean of means": Bug(
        "LLaMA-Factory, axolotl: every rank divides by its own count; the mean over ranks follows",
        ((MESH, "return _sum(value, self.batch_group)", "return value * self.batch_group.size()"),),
        ("exact: qwen3 tied: shard2", "exact: qwen3 tied: zero0 replicate2", "exact: qwen3 tied: replicate2 shard2 micro1",
         "exact: qwen3 tied: shard2 fp32", "exact: qwen3 tied: zero0 replicate2 fp32",
         "exact: qwen3 tied: replicate2 shard2 micro1 fp32"),
    ),
    "a mean of the ranks' means": Bug(
        "transformers PR 34191, torchtune PR 1875: every rank divides by its own count",
        (("objectives/pretrain.py", "return batches, program.mesh.sum_over_batch(local)",
          "return batches, local * program.mesh.layout.batch_ranks"),),
        verify=Seen(("parallel.shard=2",), "loss", "step 1"),
    ),
    "dropped count": Bug(
        "the count of one rank is taken for that of all",
        ((MESH, "return _sum(value, self.batch_group)", "return value"),),
        ("exact: qwen3 tied: shard2", "exact: qwen3 tied: zero0 replicate2", "exact: qwen3 tied: zero0 replicate2 fp32",
         "exact: qwen3 tied: shard2 fp32"),
    ),
    "dropped gradient of a bucket": Bug(
        "a copy is summed: every rank keeps its own gradient",
        ((DDP, "work = dist.all_reduce(sums, group", "work = dist.all_reduce(sums.clone(), group"),),
        ("exact: qwen3 tied: zero0 replicate2", "exact: qwen3 tied: zero0 replicate2 fp32"),
    ),
    "dropped gradient of replicas": Bug(
        "shards are summed inside of a replica, and never over the replicas; counts and losses are",
        ((MESH, 'self.dense["replicate", "fsdp"] if self.layout.replicate > 1 else ', ""),),
        ("exact: qwen3 tied: replicate2 shard2 micro1", "exact: qwen3 tied: replicate2 shard2 micro1 fp32"),
    ),
    "silenced replicas": Bug(
        "FSDP2 is set not to all-reduce, and hands out no gradient at all: the check of gradients stops the run",
        ((FSDP, "unit.set_requires_all_reduce(is_last,", "unit.set_requires_all_reduce(False,"),),
        ("exact: qwen3 tied: replicate2 shard2 micro1",), said="BadLayout: .* parameters got no gradient in the first step",
    ),
    "averaged over data ranks": Bug(
        "FSDP's default: a loss that is divided by the global count is divided by the ranks once more",
        ((FSDP, "one.set_gradient_divide_factor(1.0)", "pass"),),
        ("exact: qwen3 tied: zero2 shard2", "exact: qwen3 tied: replicate2 shard2 micro1",
         "exact: qwen3 tied: zero1 shard2 micro1", "exact: qwen3 tied: zero2 shard2 fp32",
         "exact: qwen3 tied: replicate2 shard2 micro1 fp32", "exact: qwen3 tied: zero1 shard2 micro1 fp32",
         "policy: qwen3 tied: shard2 bf16 reduce-bf16",
         "policy: qwen3 tied: shard2 bf16 output-bf16"),
        Seen(("parallel.shard=2",), "gradients", "is 0.5 times too large"),
    ),
    "a rank's own scale": Bug(
        "fp8 weights are gathered with the scale of a rank's own rows, and every rank reads all of them by its own",
        (("precision/fp8_weights.py", "dist.all_reduce(largest, dist.ReduceOp.MAX, self._shards)", "pass"),),
        ("policy: qwen3 tied wide: shard2 fp8",),
    ),
    "averaged by DDP": Bug(
        "what torch's DDP does: the sum is divided by the number of ranks",
        ((DDP, ".to(self._reduce)", ".to(self._reduce) / self._group.size()"),),
        ("exact: qwen3 tied: zero0 replicate2", "exact: qwen3 tied: zero0 replicate2 fp32",
         "policy: qwen3 tied: zero0 replicate2 bf16 reduce-bf16", "policy: qwen3 tied: zero0 replicate2 bf16-pure"),
    ),
    "accumulation sums what was summed": Bug(
        "torchtitan #1733, #1732: accumulation became a moving sum; here every micro-batch sends what it has filled",
        ((DDP, "list(self._num_members) if is_last else []", "list(self._num_members)"),
         (DDP, 'assert not self._sent, "the step before did not finish"', "self._sent and self.finish()")),
        ("exact: qwen3 tied: zero0 replicate2", "exact: qwen3 tied: zero0 replicate2 fp32",
         "policy: qwen3 tied: zero0 replicate2 bf16"),
        Seen(("parallel.zero=0", "parallel.replicate=2"), "gradients", "model.embed_tokens.weight"),
    ),
    "a bucket leaves before its last gradient is added": Bug(
        "a reviewer: a master's slot says that it is filled, and is filled then",
        (("precision/masters.py", "    is_first = master.grad is None\n", "    is_first = master.grad is None\n    slot and slot.added()\n"),
         ("precision/masters.py", "    if slot is not None:\n        slot.added()\n", ""),
         (DDP, ".to(self._reduce)", ".to(self._reduce, copy=True)")),  # as it is then: sending may take its time
        ("policy: qwen3 tied: zero0 replicate2 bf16",),
    ),
    "a step begins with the sums of the last": Bug(
        "buckets stay between steps: the first gradient is written to its slot, and not added",
        ((DDP, "slot.total.copy_(parameter.grad)", "slot.total.add_(parameter.grad)"),
         (DDP, "flat = torch.empty(", "flat = torch.zeros(")),
        ("exact: qwen3 tied: zero0 replicate2", "exact: qwen3 tied: zero0 replicate2 fp32"), steps=2,
    ),
    "sums left in the other dtype": Bug(
        "what was summed in bf16 is not copied back: every rank keeps its own gradient",
        ((DDP, "bucket.copy_(sums)", "pass"),),
        ("policy: qwen3 tied: zero0 replicate2 bf16 reduce-bf16",), said="fp32's reference",
    ),
    "gradients not sent without accumulation": Bug(
        "a reviewer: what goes right with several micro-batches, and a recipe may have one",
        ((PROGRAM, "is_last = index == len(batches) - 1", "is_last = index == len(batches) - 1 and index > 0"),
         (DDP, "if len(self._sent) < len(self._buckets):\n", "if not self._sent:\n            return\n        if False:\n")),
        ("exact: qwen3 tied: zero0 replicate2 micro4",),
        Seen(("parallel.replicate=2", "parallel.zero=0"), "OutOfSync",
             "model.model.embed_tokens.weight differs between ranks 0 and 1 after step 2"),
    ),
    "the last micro-batch only": Bug(
        "what earlier micro-batches left on the host is overwritten and not added to",
        ((PROGRAM, "            self._sender.before(", "            self.model.zero_grad()\n            self._sender.before("),),
        ("exact: qwen3 tied: shard2 micro1 offload", "exact: qwen3 tied: shard2 micro1 offload fp32"),
    ),
    "stepped elsewhere": Bug(
        "the optimizer steps its own copy of the weights, which never goes back",
        ((GROUPS, ".append(record.tensor)", ".append(torch.nn.Parameter(record.tensor.detach().clone()))"),
         (ADAMW, "        self._num_steps += 1\n", "        for record in self._records:\n            record.tensor.grad = None\n")),
        ("exact: qwen3 tied: shard2 micro1 offload", "exact: qwen3 tied: shard2 micro1 offload fp32"),
    ),
    "only the last bucket waited for": Bug(
        "a reviewer: what goes right with one bucket of gradients",
        ((DDP, "    while sent:\n        _take(*sent.popleft())", "    if sent:\n        _take(*sent.pop())"),),
        ("exact: qwen3 tied: tp2 zero0 replicate2 bucket0.05",),
        Seen(("parallel.tp=2", "parallel.replicate=2", "parallel.zero=0"), "OutOfSync",
             "model.model.embed_tokens.weight differs between ranks 0 and 2 after step 1"),
    ),
    "norm of a rank's own shards": Bug(
        "LLaMA-Factory PR 10640: norm off by sqrt(shards), each shard clipped by its own",
        ((CLIP, "norm = torch.nn.utils.get_total_norm(gradients)", "norm = torch.nn.utils.get_total_norm(_local(gradients))"),),
        verify=Seen(("parallel.shard=2",), "gradient norm", "step 1 on rank 0"), mistake="clip_per_rank",
    ),
    "clipped by a rank's own norm, the true one logged": Bug(
        "each rank scales by the norm of what it holds, and reports the true norm",
        ((ADAMW, "        divisor = clip_divisor(norm, self._max_norm)\n",
          "        own = [getattr(record.tensor.grad, '_local_tensor', record.tensor.grad) for record in self._records]\n"
          "        divisor = clip_divisor(torch.nn.utils.get_total_norm(own), self._max_norm)\n"),),
        # AdamW's step does not change with the scale of all gradients of a tensor: in a pipeline it shows in fp64's digits only
        ("exact: qwen3 tied: shard2", "exact: qwen3 tied: replicate2 shard2 micro1", "exact: qwen3 tied: shard2 micro1 offload",
         "exact: qwen3 tied: shard2 fp32", "exact: qwen3 tied: replicate2 shard2 micro1 fp32",
         "exact: qwen3 tied: shard2 micro1 offload fp32", "exact: qwen3 tied blocks5: pp2 1f1b", "exact: qwen3 tied: tp2 shard2"),
    ),
    "small gradients scaled up to the norm": Bug(
        "a reviewer: a clip that also does the opposite",
        ((CLIP, ".div_(max_norm).clamp_(min=1.0)", ".div_(max_norm)"),),
        ("exact: qwen3 tied: shard2 unclipped",),
        Seen(("parallel.shard=2",), "loss of later steps", "step 3 on rank 0"),
    ),
    "torch's kernel clips by the inverse": Bug(
        "a factor is given to a kernel that divides by it",
        ((ADAMW, "grad_scale = divisor", "grad_scale = divisor.reciprocal()"),),
        ("exact: qwen3 tied: shard2 fp32", "exact: qwen3 tied: replicate2 shard2 micro1 fp32"), steps=2,
    ),
    "an update that does not clip": Bug(
        "the divisor is computed, and forgotten by the pass that divides",
        (("optim/elementwise.py", "gradient_N.to(wide) / divisor", "gradient_N.to(wide)"),),
        ("policy: qwen3 tied: shard2 fp32 states-bf16", "policy: qwen3 tied: zero0 replicate2 bf16-pure"),
        said="one process|fp32's reference", steps=2,
    ),
    "matrices that are not clipped": Bug(
        "AdamW's part of the model is clipped, Muon's is not",
        ((MUON, "local_tensor(parameter.grad) / divisor", "local_tensor(parameter.grad)"),),
        ("exact: qwen3 tied: zero0 replicate2 muons", "exact: qwen3 tied: shard2 full muons"), steps=2,
    ),
    "scale dropped by the schedule": Bug(
        "a group's rate is set to the schedule's, without its own scale",
        ((GROUPS, 'group["lr"] = rate * group["lr_scale"]', 'group["lr"] = rate'),),
        ("exact: qwen3 tied: zero0 replicate2 rates", "exact: qwen3 tied: shard2 full rates"),
    ),
    "frozen weights decay": Bug(
        "decay without a gradient: what is frozen becomes smaller",
        ((ADAMW, "        self._records = trainable(records)\n", "        self._all = records\n        self._records = trainable(records)\n"),
         (ADAMW, "        self.torch_optimizer.zero_grad()\n", "        self.torch_optimizer.zero_grad()\n"
          "        [r.tensor.data.mul_(1 - 1e-4) for r in self._all if not r.tensor.requires_grad]\n")),
        ("exact: qwen3 tied: zero0 replicate2 frozen-bottom", "exact: qwen3 tied: shard2 full frozen-middle"),
    ),
    "decay by the shape of a flat shard": Bug(
        "0 of 20 parameters decayed: a flat shard has one dimension",
        ((GROUPS, "if len(record.logical_shape) >= 2 else 0.0",
          "if len(record.logical_shape) >= 2 and not isinstance(record.tensor, DTensor) else 0.0"),),
        ("exact: qwen3 tied: zero2 shard2 rates",), mistake="decay_lost_to_sharding",
    ),
    "nothing is frozen": Bug(
        "the names reach no parameter",
        (("parallel/build.py", "parameter.requires_grad_(name not in names)", "parameter.requires_grad_(True)"),),
        ("exact: qwen3 tied: shard2 full frozen-bottom", "exact: qwen3 tied: zero0 replicate2 frozen-middle"),
    ),
    "parts of a matrix orthogonalised alone": Bug(
        "every rank iterates on its own rows or columns",
        ((MUON, "        cut = _cut(dealt[0])\n", "        return [newton_schulz(one, 5) for one in updates]\n        cut = _cut(dealt[0])\n"),),
        ("exact: qwen3 tied: shard2 full muons", "exact: qwen3 tied: replicate2 shard2 micro1 muons", "exact: qwen3 tied: tp2 micro8 muon"),
    ),
    "momentum at AdamW's rate": Bug(
        "the factor that matches Muon's update to AdamW's is left out",
        ((MUON, "size = rate * MATCH_ADAMW * ", "size = rate * "),),
        ("exact: qwen3 tied: zero0 replicate2 muons",),
    ),
    "the optimizer's state is lost on resume": Bug(
        "torchtitan #1136, axolotl #2744: a resumed run has another loss",
        (("training/start/restore.py", "return weight_tensors(program) | state | scale", "return weight_tensors(program) | scale"),),
        verify=Seen(("parallel.shard=2",), "resumed: loss", "step 3"),
    ),
    "a resume that loses the optimizer's states": Bug(
        "a reviewer: a run that begins from another's checkpoint keeps them, its own resume does not",
        (("training/start/restore.py", "    if trainer_state is not None:\n",
          "    if trainer_state is not None:\n        [state.zero_() for state in optimizer.state_tensors().values()]\n"),),
        verify=Seen(("parallel.shard=2",), "resumed: loss", "step 3"),
    ),
    "one tensor's second moments are doubled on resume": Bug(
        "an auditor: the tensor nearest to the loss was named, which the next update had moved by 3e-8",
        (("training/start/restore.py", "    if trainer_state is not None:\n",
          "    if trainer_state is not None:\n"
          '        optimizer.state_tensors()["model.layers.1.mlp.up_proj.weight.exp_avg_sq"].mul_(2)\n'),),
        verify=Seen(("parallel.shard=2",), "resumed: loss", "step 3", tensor="model.layers.1.mlp.up_proj.weight["),
    ),
    "replicas draw apart": Bug(
        "OLMo-core PR 319: nothing sends the first weights around, and each replica begins with its own",
        (("training/start/restore.py", "initialise(named.items(), architecture, seed, block)", "initialise(named.items(), architecture, torch.distributed.get_rank(), block)"),),
        verify=Seen(("parallel.shard=2", "parallel.replicate=2"), "drawn weights",
                    "model.layers.1.mlp.down_proj.weight[34, 25] on rank 2: "),
    ),
    "validation times the ranks": Bug(
        "transformers #35078: the loss that is printed for a set grows with the processes that score it",
        (("training/run.py", "self.recorder.validation(step, name, total, count,", "self.recorder.validation(step, name, total, count // self.runtime.world,"),),
        verify=Seen(("parallel.shard=2",), "reported validation", "step 0 on rank 0"),
    ),
    "a halved validation": Bug(
        "a reviewer: what is scored is not what is learned from",
        ((PROGRAM, "total = torch.stack([self._forward(batch) for batch in batches]).sum()",
          "total = torch.stack([self._forward(batch) for batch in batches[::2]]).sum()"),),
        ("masks: gpt2 tied drops: one micro1",),
        Seen(("parallel.shard=2",), "validation before", "step 0 on rank 0"),
    ),
}
