"""Which parts of a model treat each token by itself, and which stay whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from swaptrain.capture.tokens.divided import DividedTokens, divide_tokens
from swaptrain.capture.uncut import Uncut
from tests.capture.in_memory import captured_model
from tests.support.matrix import proof_but
from tests.support.mixtures import MIXTURES

_DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 16},
    "gemma3_text": {**_DECODER, "head_dim": 16, "sliding_window": 16},
    "gemma2": {**_DECODER, "head_dim": 16, "sliding_window": 16},
    "phi3": _DECODER,
    "gpt2": {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "use_cache": False,
    },
    "qwen3_moe": {**MIXTURES["qwen3_moe"], "intermediate_size": 96, "mlp_only_layers": [0]},
}  # fmt: skip
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FOUND: dict[str, dict[int, tuple[str, ...]]] = {
    "llama": dict.fromkeys((0, 1), ("post_attention_layernorm", *GATED)),
    "qwen3": dict.fromkeys((0, 1), ("post_attention_layernorm", *GATED)),
    # 1 + the norms' weights is the same for all tokens, and computed once.
    "gemma3_text": dict.fromkeys((0, 1), GATED),
    "phi3": dict.fromkeys((0, 1), ("post_attention_layernorm", "mlp.gate_up_proj", GATED[2])),
    "gpt2": dict.fromkeys((0, 1), ("ln_2", "mlp.c_fc", "mlp.c_proj")),
    "qwen3_moe": {0: ("post_attention_layernorm", *GATED)},
}
"""By layer: the modules whose weights its region reads."""
OTHERS = [name for name in FOUND if name not in ("llama", "gpt2")]


def language_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    transformers.logging.set_verbosity_error()
    fields = {**MODELS[name], "attn_implementation": "eager" if name == "gemma2" else "sdpa"}
    config = transformers.AutoConfig.for_model(name, **fields)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype)


def sequences(count: int = 2, length: int = 24, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (count, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def modules_of(uncut: Uncut, divided: DividedTokens) -> dict[int, list[str]]:
    """Return the modules whose weights regions read, by number of the layer, in order."""
    found: dict[int, list[str]] = {}
    for region in divided.regions:
        for node in region.whole_inputs:
            binding = uncut.origins.get(node)
            if binding is None:
                continue
            before, _, name = binding.name.partition(".0." if ".0." in binding.name else ".1.")
            assert before.endswith(("layers", "h"))
            modules = found.setdefault(0 if ".0." in binding.name else 1, [])
            if (module := name.rpartition(".")[0]) not in modules:
                modules.append(module)
    return found


@pytest.mark.parametrize("name", proof_but(FOUND, "llama", "gpt2", whole=OTHERS))
def test_each_mlp_with_its_norm_and_the_head_are_found(name: str, tmp_path: Path) -> None:
    """Whatever the shape of the MLP; experts are sorted by the router, and stay whole."""
    uncut = captured_model(partial(language_model, name), sequences(), tmp_path)
    divided = divide_tokens(uncut.captured, uncut.trace, 16)
    found = modules_of(uncut, divided)
    assert {k: set(v) for k, v in found.items()} == {k: set(v) for k, v in FOUND[name].items()}
    assert [len(region.row_inputs) for region in divided.regions] == [1] * len(FOUND[name])
    assert len(divided.heads) == 1
    few = divide_tokens(uncut.captured, uncut.trace, 48)  # as many as there are
    assert not few.regions and not few.heads


class Wide(nn.Module):
    """A layer of 8 numbers a token that is wide inside, and a loss."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        return F.mse_loss(hidden + self.last(self.middle(self.first(hidden))), x)


def mixed(x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)


def drawn(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def by_place(x: Tensor) -> Tensor:
    """Another number at each place of a sequence, the same for all sequences."""
    return x * torch.arange(24.0)[:, None]


def columns(x: Tensor) -> Tensor:
    """As of MLPs whose gate and values are one product."""
    gate, value = x.chunk(2, -1)
    return torch.cat([F.silu(gate) * value, gate], -1)


def regions_of(middle: Callable[[Tensor], Tensor], tmp_path: Path, **batch: Tensor) -> int:
    given: Mapping[str, Tensor] = batch or {"x": torch.zeros(2, 24, 8)}
    uncut = captured_model(partial(Wide, middle), given, tmp_path)
    return len(divide_tokens(uncut.captured, uncut.trace, 16).regions)


def test_what_mixes_tokens_or_draws_is_no_part_of_a_region(tmp_path: Path) -> None:
    assert regions_of(F.gelu, tmp_path) == 1
    assert regions_of(columns, tmp_path) == 1
    assert regions_of(F.gelu, tmp_path, x=torch.zeros(48, 8)) == 1
    assert regions_of(mixed, tmp_path) == 0
    assert regions_of(by_place, tmp_path) == 0
    assert regions_of(drawn, tmp_path) == 0
