"""ToolNames of optimizers and their arguments: those of the Trainer, which Axolotl takes too."""

from __future__ import annotations

from swaptrain.migrate.draft import Draft

__all__ = ["add_optimizer"]

_SAME = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla"), "adamw"),
    **dict.fromkeys(("adamw_hf", "adamw", "paged_adamw_32bit", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_torch_npu_fused", "optimi_adamw"), "adamw"),
    **{name: name for name in ("sgd", "adagrad", "rmsprop")},
}
"""Those whose rule is that of a class of torch.optim."""
_FEWER_BITS = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw"),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_fp8"), "adamw"),
    **dict.fromkeys(("adamw_anyprecision", "flash_adamw"), "adamw"),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), "rmsprop"),
}
"""Those that keep the moments in fewer bits than the rule has."""
_ADAMS = ("adamw", "adam")


def add_optimizer(draft: Draft, key: str) -> None:
    """Set name, rate, weight decay and arguments; `key` is theirs for the name."""
    given = draft.given
    named = given.text(key)
    if named is None:
        name = "adamw"
    elif named in _SAME:
        name = _SAME[named]
        draft.set("optimizer.name", name, f"{key}: {named}")
    elif named in _FEWER_BITS and named.endswith("8bit"):
        name = _FEWER_BITS[named]
        draft.set("optimizer.name", name, f"{key}: {named}")
        draft.set("optimizer.state", "8bit", f"{key}: {named}")
    elif named in _FEWER_BITS:
        name = _FEWER_BITS[named]
        draft.set("optimizer.name", name, f"{key}: {named}, with moments in float32")
    elif named == "adafactor":
        name = "adafactor"
        draft.set("optimizer.name", name, f"{key}: {named}")
        draft.remark(
            key,
            named,
            "torch.optim's scales the rate of each weight by that weight's root mean square, which "
            "the Trainer's does not: choose optimizer.lr anew, such as 1e-2",
        )
    else:
        name = "adamw"
        draft.set("optimizer.name", name, f"instead of {key}: see the end")
        draft.remark(
            key,
            named,
            "it is no class of torch.optim with a state for each parameter: adamw stands in its "
            "place, so choose optimizer.lr anew",
        )
    _add_arguments(draft, name)


def _add_arguments(draft: Draft, name: str) -> None:
    given = draft.given
    decay = given.number("weight_decay")
    if decay is None:
        draft.default("optimizer.weight_decay", 0.0)
    else:
        draft.set("optimizer.weight_decay", decay, "weight_decay")
    first, second = given.number("adam_beta1"), given.number("adam_beta2")
    eps = given.number("adam_epsilon", "adam_eps")
    if name in _ADAMS:
        if first is not None or second is not None:
            betas = [0.9 if first is None else first, 0.999 if second is None else second]
            draft.set("optimizer.betas", betas, "adam_beta1, adam_beta2")
        if eps is not None:
            draft.set("optimizer.eps", eps, "adam_epsilon")
    norm = given.number("max_grad_norm")
    if norm is None:
        draft.default("optimizer.clip_norm", 1.0)
    elif norm > 0:
        draft.set("optimizer.clip_norm", norm, "max_grad_norm")
    else:
        draft.set("optimizer.clip_norm", None, f"max_grad_norm: {norm:g}")
