"""What is stored, multiplied and reduced in which dtype.

config      the recipe's `precision` section
policy      the dtypes of a policy, as torch names
masters     16 bits on ranks that shard nothing: parameters beside fp32 masters
sums        gradients that the product adds to their sums itself, on a GPU
fp8         products of the blocks in eight bits, by torchao
fp8_weights their weights, cast once per global batch and gathered by FSDP2 in eight bits
loss_scale  fp16's loss scale, on the device
same_bits   kernels that give the same bits twice, on request
"""
