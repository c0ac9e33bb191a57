"""Attention behind one function, `attend(q, k, v, layout)`.

attend          chooses the kernel: fused, by document, across ranks or unfused
layout          who sees whom: offset, window, documents, the ranks that share a row
documents       several documents in a row, each attending to itself alone
context         keys and values of a row that several ranks share
flash_versions  FlashAttention 3 or 4 in place of torch's own, where a package of it is installed and right

Inside:

causal          the causal mask and torch's fused kernel
unfused         an explicit softmax, where dropout or dtype needs it
"""
