"""Experts and their routers, and what is stored, summed and rounded in 16 bits."""

from tests.proof.bugs.bug import Bug, Seen

EXPERT, MOE, ROUTING, ROUTERS = "parallel/expert.py", "model/moe.py", "model/routing.py", "parallel/routers.py"
DDP, POLICY, SCALE, ROUNDING = "parallel/ddp.py", "precision/policy.py", "precision/loss_scale.py", "optim/rounding.py"
EXPERT2, TP2 = ("parallel.expert=2", "parallel.shard=2"), ("parallel.tp=2", "parallel.shard=1")
DEALT = ("exact: qwen3_moe: expert2 shard2",)

# fmt: off
# ruff: noqa: E501  texts of the source, whole lines of it
EXPERTS = {
    "a router's loss averaged over ranks": Bug(
        "the auxiliary loss is divided by the data ranks",
        ((ROUTERS, "scale = self._count.reciprocal()", "scale = self._count.reciprocal() / self._mesh.loss_group.size()"),),
        ("exact: qwen3_moe: shard2",),
    ),
    "a router's loss once per tensor rank": Bug(
        "Megatron-LM #7452: the auxiliary loss grows with tensor parallelism",
        ((ROUTING, "factor = self._arch.router_loss_scale / self.num_sharing", "factor = self._arch.router_loss_scale"),),
        ("exact: qwen3_moe: tp2 micro8",),
        Seen(TP2, "gradients", "model.layers.2.mlp.gate.weight[", "qwen3_moe"),
    ),
    "a router's loss over a context rank's own tokens": Bug(
        "transformers #48687 and Megatron-LM #7452: shares of experts averaged before they are multiplied",
        ((EXPERT, "        model.routing.sum_counts = _sum_over(mesh.context.get_group())\n", "        pass\n"),),
        ("exact: qwen3_moe: context2",),
        Seen(("parallel.context=2", "parallel.shard=1"), "gradients", "model.layers.2.mlp.gate.weight[", "qwen3_moe"),
    ),
    "a router's loss of the last stage only": Bug(
        "earlier stages of a pipeline add none",
        ((ROUTERS, "part.routing.begin(scale if", "part.routing.begin(scale * part.last if"),),
        ("exact: qwen3_moe tied deep: pp2",),
    ),
    "a router's loss over the micro-batch": Bug(
        "all rows joined before counts and probabilities are multiplied, as transformers does",
        ((ROUTING, "self._routed.append(routed)", "self._routed.append(tuple(sums.sum(0, keepdim=True) for sums in routed))"),),
        ("exact: qwen3_moe: shard2",),
    ),
    "router figures of one replica": Bug(
        "a reviewer: what is reported is not what is trained",
        ((ROUTERS, "for group in (self._mesh.loss_group, self._mesh.pp_group):", "for group in (self._mesh.pp_group,):"),),
        DEALT,
        Seen(EXPERT2, "router figures", "step 1", "qwen3_moe"),
    ),
    "the sum of a token's router weights is a constant": Bug(
        "a reviewer: a forward that is right, a backward that is not",
        ((MOE, "weights_BTK / weights_BTK.sum(-1, keepdim=True)", "weights_BTK / weights_BTK.detach().sum(-1, keepdim=True)"),),
        DEALT,
        Seen(EXPERT2, "gradients", "model.layers.2.mlp.gate.weight[", "qwen3_moe"),
    ),
    "experts' gradients summed over their owners": Bug(
        "the owner's gradient covers every expert rank's tokens already",
        (("parallel/program.py", "        if self._loss_scale is not None:\n            self._loss_scale.unscale(local_gradients(self._records))\n",
          "        for record in self._records:\n            if '.experts.' in record.name:\n"
          "                torch.distributed.all_reduce(record.tensor.grad.to_local(), group=self.mesh.expert['expert'].get_group())\n"),),
        DEALT,
    ),
    "router weights applied twice": Bug(
        "before the experts, and after",
        ((MOE, "(made_BTKD * weights_NK.view(*shape, 1)).sum(-2)", "(made_BTKD * weights_NK.view(*shape, 1) ** 2).sum(-2)"),),
        DEALT,
    ),
    "experts counted twice in the norm": Bug(
        "summed over ranks that hold other experts as if they were replicas",
        (("optim/clip.py", "    return norm.full_tensor() if isinstance(norm, DTensor) else norm",
          "    names = getattr(getattr(gradients[0], 'device_mesh', None), 'mesh_dim_names', ())\n"
          "    return (norm.full_tensor() if isinstance(norm, DTensor) else norm) * (2**0.5 if 'expert' in names else 1.0)"),),
        DEALT,
    ),
    "rows do not find back": Bug(
        "the way back is taken for the way there",
        ((EXPERT, "order_Q, inverse_Q = sort_rows(expert_Q)", "order_Q = inverse_Q = sort_rows(expert_Q)[0]"),),
        DEALT,
    ),
    "rows left by sender": Bug(
        "what arrives is not sorted by expert",
        ((EXPERT, "order_Q, inverse_Q = sort_rows(expert_Q)", "order_Q = inverse_Q = torch.arange(len(expert_Q))"),),
        DEALT,
    ),
    "a row too many for an expert is dropped": Bug(
        "as with a capacity: what comes beyond it is zero",
        ((MOE, "return self._one_by_one(rows_RD, counts_E, gate_EFD, up_EFD, down_EDF)",
          "place = torch.arange(len(rows_RD)) - (counts_E.cumsum(0) - counts_E).repeat_interleave(counts_E)\n"
          "            return self._one_by_one(rows_RD, counts_E, gate_EFD, up_EFD, down_EDF) * (place < 9)[:, None]"),),
        DEALT,
    ),
    "tokens come back from experts without their gradients' way": Bug(
        "transformers PR 48205: the loss is right under expert parallelism, the router's gradient is not",
        ((EXPERT, "        return _all_to_all(grads[0], received_X, sent_X, ctx.group), None, None, None",
          "        return _all_to_all(grads[0], received_X, sent_X, ctx.group) * 2, None, None, None"),),
        DEALT,
        Seen(EXPERT2, "gradients", "model.embed_tokens.weight", "qwen3_moe"),
    ),
}

PRECISION = {
    "reduced in bf16": Bug(
        "sums over ranks lose what bf16 loses",
        ((POLICY, "reduce_dtype=self.reduce if self.is_mixed or self.reduce != self.stored else None", "reduce_dtype=torch.bfloat16"),),
        ("policy: qwen3 tied: shard2 bf16", "policy: qwen3 tied: shard2 fp16", "policy: qwen3 tied: replicate2 shard2 bf16 states-bf16"),
        said="one process",
    ),
    "reduced in bf16 by DDP": Bug(
        "fp32 sums of micro-batches are added over ranks in 16 bits",
        ((DDP, "self._buckets[len(self._sent)].to(self._reduce)", "self._buckets[len(self._sent)].to(torch.bfloat16)"),),
        ("policy: qwen3 tied: zero0 replicate2 bf16", "exact: qwen3 tied: zero0 replicate2 fp32"),
    ),
    "unscaling forgotten": Bug(
        "fp16's gradients keep the loss scale",
        ((SCALE, "torch._foreach_mul_(gradients, self.scale.reciprocal())", "pass"),),
        ("policy: qwen3 tied: zero0 replicate2 fp16", "policy: qwen3 tied: shard2 fp16 states-bf16"), said="fp32's reference",
    ),
    "scaled per micro-batch": Bug(
        "unscaled once more than scaled, as if each micro-batch had been",
        ((SCALE, "self.scale.reciprocal())", "self.scale.reciprocal().square())"),),
        ("policy: qwen3 tied: shard2 fp16",), said="fp32's reference",
    ),
    "truncated moments": Bug(
        "rounded down in place of up or down by chance",
        ((ROUNDING, "((value.view(torch.int32) + noise) & -65536)", "(value.view(torch.int32) & -65536)"),),
        ("policy: qwen3 tied: shard2 bf16 states-bf16", "policy: qwen3 tied: shard2 fp16 states-bf16",
         "policy: qwen3 tied: zero0 replicate2 fp32 states-bf16"),
        said="one process",
    ),
    "local noise": Bug(
        "every rank counts its own elements from 0",
        ((ROUNDING, "    first, sizes = _box(tensor)\n    whole", "    return Numbering(0, 1, 1)\n    whole"),),
        ("policy: qwen3 tied: shard2 fp32 states-bf16", "policy: qwen3 tied: replicate2 shard2 bf16 states-bf16"), said="one process",
    ),
    "correction forgotten": Bug(
        "moments are taken for what they are at the end",
        (("optim/elementwise.py", "(1 - beta2**count).sqrt()", "torch.ones_like(count)"),),
        ("policy: qwen3 tied: zero0 replicate2 bf16-pure", "policy: qwen3 tied: shard2 bf16-pure nearest",
         "policy: qwen3 tied: shard2 bf16-pure products-fp32"),
        said="one process|fp32's reference", steps=2,
    ),
}
