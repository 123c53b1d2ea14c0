"""What is chosen for a model, data and a machine: it loads, it fits, and it says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.config.load import parse_config
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.start import DataFacts, MachineFacts, Method, ModelFacts, chosen
from swaptrain.start import choices as choices_module
from swaptrain.units import GIB, MIB

RUN = Path("runs/a")


def model(
    parameters: int = 10**9, stored: str | None = "BF16", positions: int | None = 4096
) -> ModelFacts:
    return ModelFacts("LlamaForCausalLM", parameters, stored, positions, is_masked=False)


def rows(*lengths: int, count: int | None = None) -> DataFacts:
    total = len(lengths) if count is None else count
    tokens = sum(lengths) * total // len(lengths)
    files, what = ("rows.jsonl",), f"{total:,} conversations"
    whole = count is None
    return DataFacts(
        "chat", files, what, "m", None, total, tokens, tuple(sorted(lengths)), total, whole
    )


def machine(ram: int = 16 * GIB, disk: int | None = 10**12) -> MachineFacts:
    return MachineFacts(ram, disk, Path("/"), 8, None)


def config_of(
    its_model: ModelFacts,
    data: DataFacts,
    its_machine: MachineFacts,
    method: Method | None = None,
    micro_batch: int | None = None,
) -> Config:
    """Return what the chosen text loads as."""
    choice = chosen("m", its_model, data, its_machine, RUN, method=method, micro_batch=micro_batch)
    return parse_config(choice.config.text(("head",), ("tail",)), source="chosen")


@given(
    parameters=st.integers(1, 10**12),
    stored=st.sampled_from([None, "F32", "BF16", "F16", "F8_E4M3"]),
    positions=st.none() | st.integers(1, 10**6),
    lengths=st.lists(st.integers(1, 10**5), min_size=1, max_size=30),
    count=st.integers(1, 10**8),
    ram=st.integers(2**20, 2**42),
    disk=st.none() | st.integers(0, 2**45),
    method=st.sampled_from(["lora", "full", None]),
    micro_batch=st.none() | st.integers(1, 4),
)
@settings(deadline=None)
def test_whatever_is_found_the_config_loads_or_is_refused(
    parameters: int,
    stored: str | None,
    positions: int | None,
    lengths: list[int],
    count: int,
    ram: int,
    disk: int | None,
    method: Method | None,
    micro_batch: int | None,
) -> None:
    """It stays within positions, micro-batch and RAM; a refusal is one line."""
    facts, data = model(parameters, stored, positions), rows(*lengths, count=count)
    try:
        found = config_of(facts, data, machine(ram, disk), method, micro_batch)
    except ConfigError as error:
        assert "disk" in str(error)
        assert "\n" not in str(error)
        return
    assert found.data.sequence_length <= (positions or 10**6)
    assert micro_batch is None or found.data.micro_batch <= micro_batch
    assert found.memory.host <= max(ram // 2, 256 * MIB)
    assert (found.data.held_out is None) == (found.eval is None) == (count < 100)
    assert method is None or (found.lora is not None) == (method == "lora")


@pytest.mark.parametrize(
    ("facts", "its_machine", "adapters", "reason"),
    [
        (model(10**8), machine(), False, "fits in memory.host"),
        (model(10**10), machine(), True, "does not fit in memory.host"),
        (model(10**10, stored=None), machine(), False, "there are no weights to keep"),
        (model(10**10), machine(disk=30 * GIB), True, "of disk, more than is free"),
    ],
)
def test_adapters_or_all_weights(
    facts: ModelFacts, its_machine: MachineFacts, adapters: bool, reason: str
) -> None:
    """By what memory and disk hold; the comment says it."""
    choice = chosen("m", facts, rows(100), its_machine, RUN, method=None)
    text = choice.config.text((), ())
    assert (parse_config(text, source="chosen").lora is not None) == adapters
    assert reason in " ".join(text.replace("#", " ").split())


def test_a_base_that_the_disk_does_not_hold_is_quantized() -> None:
    """In nf4, or refused where that does not fit either."""
    assert config_of(model(10**10), rows(9), machine(disk=10 * GIB)).model.base == "nf4"
    with pytest.raises(ConfigError, match=r"in nf4, and 1\.0 GiB are free at /: make room"):
        config_of(model(10**10), rows(9), machine(disk=GIB))
    with pytest.raises(ConfigError, match="--full: training all of the model takes"):
        config_of(model(10**10), rows(9), machine(disk=10 * GIB), "full")


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are trained, or the line says what to install."""
    monkeypatch.setattr(choices_module, "find_spec", lambda name: None)
    assert config_of(model(10**10), rows(9), machine()).lora is None
    for disk, method in ((10**12, "lora"), (GIB, None)):
        with pytest.raises(ConfigError, match=r"pip install 'swaptrain\[lora\]'"):
            config_of(model(10**10), rows(9), machine(disk=disk), method)  # type: ignore[arg-type]


def test_lengths_decide_sequences_and_batches() -> None:
    """A sequence holds 99 of 100 rows; a step some thousand tokens, and an epoch twenty steps."""
    found = config_of(model(), rows(*[100] * 99, 3000, count=10**5), machine())
    assert found.data.sequence_length == 128
    tokens = found.data.sequence_length * found.data.micro_batch * found.data.micro_batches
    assert 4096 <= tokens <= 8192
    few = config_of(model(), rows(*[100] * 40), machine())
    assert few.data.micro_batch * few.data.micro_batches <= 2
    assert few.eval is None


def test_dtype_is_that_of_the_weights() -> None:
    """And of drawn ones bfloat16 where they are many."""
    for stored, parameters, dtype in (
        ("BF16", 10, "bfloat16"), ("F32", 10**9, "float32"), (None, 10, "float32"),
        (None, 10**9, "bfloat16"),
    ):  # fmt: skip
        assert config_of(model(parameters, stored), rows(9), machine()).model.dtype == dtype
