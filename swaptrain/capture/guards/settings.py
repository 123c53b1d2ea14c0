"""Settings of torch that change what it computes, and which of them a forward changed."""

from __future__ import annotations

import torch

__all__ = ["changed_setting", "settings"]


def settings() -> dict[str, object]:
    """Return the settings by the name of what sets them."""
    return {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.autocast": torch.is_autocast_enabled("cpu"),
    }


def changed_setting(before: dict[str, object]) -> str | None:
    """Return the name of a setting that is another one than it was."""
    now = settings()
    return next((name for name, value in before.items() if now[name] != value), None)
