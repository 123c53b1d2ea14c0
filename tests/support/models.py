"""Small models of different shapes, each with a forward that returns a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["bottleneck_unet", "convolutional", "drawn", "encoder_decoder", "frozen_mlp", "gpt"]
__all__ += ["language", "lstm", "masked", "part_frozen", "wide_mlp"]


class Convolutional(nn.Module):
    """Batch norm, in-place ReLU, a parameter that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.middle = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Linear(8 * 64, 10)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.relu(self.norms[0](self.first(x)))
        for convolution, norm in zip(self.middle, list(self.norms)[1:], strict=True):
            h = h + norm(convolution(h))
            h = self.relu(h)
        return F.cross_entropy(self.out(h.flatten(1)), y)


class Recurrent(nn.Module):
    """An LSTM of two layers: another kernel without gradients than with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True)
        self.out = nn.Linear(24, 50)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        return F.cross_entropy(self.out(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class UNet(nn.Module):
    """Long skips: values read by segments far apart."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4 * width)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge1 = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge2 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.enter(x))
        b = F.silu(self.down1(a))
        c = F.silu(self.down2(b))
        c = c + F.silu(self.norm(self.middle(c)))
        b = F.silu(self.merge1(torch.cat([self.up1(c), b], 1)))
        a = F.silu(self.merge2(torch.cat([self.up2(b), a], 1)))
        return F.mse_loss(self.leave(a), x)


class EncoderDecoder(nn.Module):
    """A transformer whose decoder layers all read the encoder's result; tied embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 40, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True
        )
        return F.cross_entropy(self.out(hidden[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


class Block(nn.Module):
    """A decoder layer with in-place residuals."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        h += x
        g = self.dropout(self.mlp(h))
        g += h
        return g


class GPT(nn.Module):
    """A hand-written decoder with a tied head, a positional parameter and a shared scale."""

    def __init__(self, layers: int = 3, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.position = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, 50, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x) * self.scale
        return F.cross_entropy(self.out(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class FrozenMLP(nn.Module):
    """Layers with frozen weights between trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        for layer in list(self.layers)[1:3]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.mse_loss(h, x)


class PartFrozen(nn.Module):
    """Trained layers around a frozen one, and a buffer of the state dict that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h)) * self.scale
        return F.mse_loss(h, x)


def part_frozen() -> nn.Module:
    return PartFrozen()


class Drawn(nn.Module):
    """Keeps numbers that its constructor drew, in a tensor and in the graph itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 512), nn.Linear(512, 16)
        self.noise, self.scale = torch.rand(16), float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x + self.noise))) * self.scale, x)


def drawn() -> nn.Module:
    return Drawn()


class WideMLP(nn.Module):
    """Matrices of 4,096 elements, whose optimizer's state can be coded; two lie transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 256) for _ in range(2))
        drawn = [torch.randn(16, 256) * 0.06 for _ in range(2)]
        self.down = nn.ParameterList(nn.Parameter(one.t()) for one in drawn)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.down[0].dtype)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + torch.tanh(up(h)) @ down
        return F.mse_loss(h.float(), x.flip(1))


def wide_mlp() -> nn.Module:
    return WideMLP()


class Language(nn.Module):
    """A decoder for bytes, called as transformers' models are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(260, width)
        self.block = Block(width, 0.0)
        self.out = nn.Linear(width, 260)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.out(self.block(self.embedding(input_ids)))
        return F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def convolutional() -> nn.Module:
    return Convolutional()


def language() -> nn.Module:
    return Language()


def lstm() -> nn.Module:
    return Recurrent()


class Masked(nn.Module):
    """A mask that is expanded over heads (stride 0), which every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.mix = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        mask = (ids % 5 != 0)[:, None, None, :].expand(batch, 4, length, length)
        h = self.embedding(ids)
        for layer in self.mix:
            q, k, v = layer(h).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            h = h + found.transpose(1, 2).reshape(batch, length, 32)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def bottleneck_unet() -> nn.Module:
    return UNet()


def encoder_decoder() -> nn.Module:
    return EncoderDecoder()


def gpt(layers: int = 3, width: int = 32, dropout: float = 0.0) -> nn.Module:
    return GPT(layers, width, dropout)


def masked() -> nn.Module:
    return Masked()


def frozen_mlp() -> nn.Module:
    return FrozenMLP()
