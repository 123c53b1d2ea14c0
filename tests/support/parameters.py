"""Models with one parameter, or a few, of an unusual kind between ordinary layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HOLES", "REFUSED", "TRAINED", "build", "data"]

D = 8
Make = Callable[[], list[nn.Parameter]]
Use = Callable[[Tensor, Tensor, list[nn.Parameter]], Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype) * 0.3


def product(h: Tensor, y: Tensor, p: list[nn.Parameter]) -> Tensor:
    return h @ p[0]


def cast_product(h: Tensor, y: Tensor, p: list[nn.Parameter]) -> Tensor:
    return h + (h.to(p[0].dtype) @ p[0]).to(h.dtype)


def scaled(h: Tensor, y: Tensor, p: list[nn.Parameter]) -> Tensor:
    return h * p[0]


def chained(h: Tensor, y: Tensor, p: list[nn.Parameter]) -> Tensor:
    return torch.tanh(h @ p[0]) @ p[1]


def modulus(h: Tensor, y: Tensor, p: list[nn.Parameter]) -> Tensor:
    return (h.to(p[0].dtype) @ p[0]).abs().to(h.dtype)


def unused(h: Tensor, y: Tensor, p: list[nn.Parameter]) -> Tensor:
    return h


def one(tensor: Tensor, *, trained: bool = True) -> list[nn.Parameter]:
    return [nn.Parameter(tensor, requires_grad=trained)]


def twice(parameter: nn.Parameter) -> list[nn.Parameter]:
    return [parameter, parameter]


class Own(nn.Parameter):
    """A parameter of a class of its own."""


HOLES: dict[str, tuple[Make, Use]] = {
    "chunks": (
        lambda: [nn.Parameter(part) for part in drawn(D, 2 * D).chunk(2, dim=1)],
        chained,
    ),
    "columns": (lambda: one(drawn(D, 2 * D)[:, ::2]), product),
    "rows": (lambda: one(drawn(2 * D, D)[::2]), product),
    "window": (lambda: one(drawn(D + 3, D + 5)[1 : D + 1, 2 : D + 2]), product),
    "vector": (lambda: one(drawn(2 * D)[::2]), scaled),
    "inner": (lambda: one(drawn(D, 2, D)[:, 1]), product),
    "transposed": (lambda: one(drawn(2 * D, D)[::2].t()), product),
    "tied": (lambda: twice(nn.Parameter(drawn(D, 2 * D)[:, ::2])), chained),
}
"""Parameters whose memory has holes."""

TRAINED: dict[str, tuple[Make, Use]] = {
    "dense in another order": (lambda: one(drawn(D, D).t()), product),
    "no elements": (lambda: one(torch.empty(0, D)) + one(torch.empty(3, 0)), unused),
    "a number": (lambda: one(torch.tensor(0.7)), scaled),
    "one element": (lambda: one(torch.tensor([[0.7]])), scaled),
    "integers": (lambda: one(torch.randint(3, (D,)), trained=False), scaled),
    "truths": (lambda: one(torch.rand(D) > 0.5, trained=False), scaled),
    "frozen doubles": (lambda: one(drawn(D, D).double(), trained=False), cast_product),
    "frozen halves": (lambda: one(drawn(D, D).half(), trained=False), cast_product),
    "frozen complex": (
        lambda: one(drawn(D, D, dtype=torch.complex64), trained=False),
        modulus,
    ),
    "a class of its own": (lambda: [Own(drawn(D, D))], product),
    "halves of one tensor": (
        lambda: [nn.Parameter(part.view(D, D)) for part in drawn(2 * D * D).split(D * D)],
        chained,
    ),
    "infinite and unused": (lambda: one(torch.full((D,), float("inf"))), unused),
}
"""Parameters that train, or stay as they are, as in plain PyTorch."""

_WEIGHT = "parameter unusual.0 "
REFUSED: dict[str, tuple[Make, Use, str]] = {
    "expanded": (lambda: one(drawn(1, D).expand(D, D)), product, "one place in memory"),
    "overlapping": (lambda: one(drawn(2 * D).unfold(0, D, 1)[:D]), product, "one place in memory"),
    "doubles": (lambda: one(drawn(D, D).double()), cast_product, "is float64 and trains"),
    "halves": (lambda: one(drawn(D, D).half()), cast_product, "is float16 and trains"),
    "bfloat16 in float32": (
        lambda: one(drawn(D, D).bfloat16()),
        cast_product,
        "is bfloat16 and trains",
    ),
    "complex": (lambda: one(drawn(D, D, dtype=torch.complex64)), modulus, "is complex64 and"),
    "double complex": (
        lambda: one(drawn(D, D, dtype=torch.complex128), trained=False),
        modulus,
        "is complex128",
    ),
    "conjugated": (lambda: one(drawn(D, D, dtype=torch.complex64).conj()), modulus, "conjugated"),
    "negated": (lambda: one(drawn(D, D, dtype=torch.complex64).conj().imag), product, "negated"),
    "quantised": (
        lambda: one(torch.quantize_per_tensor(drawn(D, D), 0.1, 0, torch.quint8), trained=False),
        lambda h, y, p: h @ p[0].dequantize(),
        "is quantised",
    ),
    "of 8 bits": (
        lambda: one(drawn(D, D).to(torch.float8_e4m3fn), trained=False),
        cast_product,
        "cannot be stored",
    ),
    "sparse": (lambda: one(drawn(D, D).to_sparse()), product, "sparse_coo"),
    "nowhere": (lambda: one(torch.empty(D, D, device="meta")), product, "on meta"),
    "not yet there": (
        lambda: [nn.parameter.UninitializedParameter()],
        product,
        "is not initialised",
    ),
    "of seven dimensions": (
        lambda: one(drawn(1, 1, 1, 2, 2, 2, 1)),
        lambda h, y, p: h + p[0].reshape(1, D),
        "7 dimensions",
    ),
    "with sparse gradients": (
        lambda: one(drawn(4, D)),
        lambda h, y, p: h + F.embedding(y, p[0], sparse=True),
        "sparse gradient",
    ),
    "with sparse gradients of bags": (
        lambda: one(drawn(4, D)),
        lambda h, y, p: h + F.embedding_bag(y[:, None], p[0], sparse=True),
        "sparse gradient",
    ),
    "gathered sparsely": (
        lambda: one(drawn(D, D)),
        lambda h, y, p: h + p[0].gather(0, y[:, None].expand(-1, D), sparse_grad=True),
        "sparse gradient",
    ),
}
"""Parameters that are refused, and what the message says."""

TRAINED |= {
    "frozen, sparsely read": (
        lambda: one(drawn(4, D), trained=False),
        lambda h, y, p: h + F.embedding(y, p[0], sparse=True),
    ),
    "scaled by frequency": (
        lambda: one(drawn(4, D)),
        lambda h, y, p: h + F.embedding(y, p[0], padding_idx=1, scale_grad_by_freq=True),
    ),
}


class Model(nn.Module):
    """Ordinary layers, with a use of the unusual parameters between them."""

    def __init__(self, make: Make, use: Use) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 4)
        self.unusual = nn.ParameterList(make())
        self.use = use

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.use(torch.tanh(self.first(x)), y, list(self.unusual))
        return F.cross_entropy(self.head(torch.tanh(self.second(h))), y)


class Items:
    """Vectors of D numbers, and one of four classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(D, generator=generator), "y": torch.tensor(index % 4)}


def build(kind: str) -> nn.Module:
    """Return the model of a kind."""
    make, use = (HOLES | TRAINED)[kind] if kind not in REFUSED else REFUSED[kind][:2]
    return Model(make, use)


def data() -> Items:
    """Return the dataset of all of them."""
    return Items()
