"""Which masks causal attention builds: none for a whole row, a window's own size for a window, none for the newest token."""

from unittest import mock

import pytest
import torch
from torch.nn import functional

from windlass.model.attention.causal import attend_causal


@pytest.mark.parametrize("window", [None, 7, 8])
def test_training_builds_no_mask_at_full_attention(window):
    q, k = torch.randn(2, 6, 7, 10), torch.randn(2, 3, 7, 10)
    with mock.patch.object(functional, "scaled_dot_product_attention", return_value=q) as kernel:
        attend_causal(q, k, k, 0, window)
    assert kernel.call_args.kwargs == {"is_causal": True, "enable_gqa": True}


def test_a_window_costs_masks_of_its_own_size_only():
    q, k = torch.randn(1, 4, 23, 10), torch.randn(1, 2, 23, 10)
    attention = functional.scaled_dot_product_attention
    with mock.patch.object(functional, "scaled_dot_product_attention", side_effect=attention) as kernel:
        attend_causal(q, k, k, 0, 5)
    shapes = [tuple(call.kwargs["attn_mask"].shape) for call in kernel.call_args_list]
    assert shapes == [(5, 5), (5, 9), (5, 9), (5, 9), (3, 7)]


def test_the_newest_token_needs_no_mask_in_a_window():
    q, k = torch.randn(1, 4, 1, 10), torch.randn(1, 2, 23, 10)
    with mock.patch.object(functional, "scaled_dot_product_attention", return_value=q) as kernel:
        attend_causal(q, k, k, 22, 5)
    assert kernel.call_args.kwargs == {"enable_gqa": True} and kernel.call_args.args[1].shape[2] == 5
