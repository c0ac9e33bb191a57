"""lm_head as a module: logits, or the summed loss of its targets (loss.py), in chunks of a size that it knows."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from windlass.model.chunks import Chunks, head_tokens
from windlass.model.head.loss import LossForm, head_loss
from windlass.model.head.one_pass import compiled_pass


class Head(nn.Linear):
    """lm_head: hidden states -> logits over the true vocabulary, or with targets the summed loss."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        padded_vocab_size: int,
        chunk_logits: int = Chunks.head_logits,
        cap: float | None = None,
    ):
        super().__init__(hidden_size, padded_vocab_size, bias=False)
        self.vocab_size, self.chunk_logits, self.cap = vocab_size, chunk_logits, cap
        self.chunk_tokens = head_tokens(chunk_logits, padded_vocab_size)
        self._one_pass: Callable[..., Tensor] | None = None

    def compile_loss(self, chunk_logits: int, most_tokens: int) -> None:
        """The loss of each chunk by one compiled function; its logits are in the dtype of products, so chunks may be larger."""
        self._one_pass = compiled_pass()
        self.chunk_tokens = min(head_tokens(chunk_logits, self.weight.shape[0]), most_tokens)

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor | None = None,
        per_row_B2: Tensor | None = None,
        by_row: bool = False,
        factor: Tensor | None = None,
        seen: Callable[[Tensor], None] | None = None,
        percent_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, vocab_size] in hidden's dtype; with targets what `head_loss` returns."""
        if targets_BT is None:
            logits_BTV = functional.linear(hidden_BTD, self.weight[: self.vocab_size])
            return logits_BTV if self.cap is None else self.cap * (logits_BTV / self.cap).tanh()
        form = LossForm(self.vocab_size, self.chunk_tokens, cap=self.cap, one_pass=self._one_pass)
        return head_loss(hidden_BTD, self.weight, targets_BT, form, per_row_B2, by_row, factor, seen, percent_BT)
