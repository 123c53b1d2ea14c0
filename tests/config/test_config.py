"""The config: loading, refusing, writing back, and what a resumed run may change."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swaptrain.config import reference as config_reference
from swaptrain.config.load import load_config
from swaptrain.config.messages import known_keys
from swaptrain.config.resume_rules import changes, check_resume, with_recorded
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError

BASE = """\
model: {hf: {model_type: llama, hidden_size: 64, id2label: {0: a}}}
data: {text: ["corpus/**/*.txt"], micro_batches: 4}
optimizer: {lr: 3e-4, betas: [0.9, 0.95], schedule: {name: cosine}}
train: {steps: 200}
memory: {host: 1.5GiB}
run: {dir: runs/x}
"""


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


def load(tmp_path: Path, text: str | bytes = BASE, *overrides: str) -> Config:
    """Load a config from text."""
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str | bytes = BASE, *overrides: str) -> str:
    """Return the message with which a config is refused."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults_and_units(tmp_path: Path) -> None:
    """Numbers such as 3e-4 are numbers, sizes are bytes, and the rest has its default."""
    config = load(tmp_path)
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.arguments == {"betas": [0.9, 0.95]}
    assert config.memory.host == 3 * 2**29
    assert config.store.chunk is None
    assert config.data.text == ("corpus/**/*.txt",)
    assert config.run.dir == Path("runs/x")
    assert config.eval is None
    assert config.model.hf == {"model_type": "llama", "hidden_size": 64, "id2label": {"0": "a"}}


def test_overrides_are_yaml_and_come_last(tmp_path: Path) -> None:
    """An override replaces what the file says, makes sections, and is parsed like the file."""
    config = load(
        tmp_path,
        BASE,
        "train.steps=1e3",
        "eval.every=50",
        "eval.text=held-out/*.txt",
        "data.shuffle=false",
        "optimizer={name: sgd, lr: '1e-2', momentum: 0.9}",
        "train.steps=300",
        "run.dir=a=b",
    )
    assert config.train.steps == 300
    assert config.eval is not None
    assert config.eval.text == ("held-out/*.txt",)
    assert not config.data.shuffle
    assert config.optimizer.lr == 0.01
    assert config.optimizer.arguments == {"momentum": 0.9}
    assert config.run.dir == Path("a=b")


@pytest.mark.parametrize("word", ["no", "on", "yes", "12:30", "2024-01-01", "0o17", "1.2.3"])
def test_words_stay_text(tmp_path: Path, word: str) -> None:
    """What YAML 1.1 takes for truth values, times or dates is text, and stays it when written."""
    config = load(tmp_path, BASE, f"run.dir={word}", f"model.hf={{model_type: x, k: [{word}]}}")
    assert str(config.run.dir) == word
    assert isinstance(config.model.hf, dict)
    assert config.model.hf["k"] == [word]
    assert yaml.safe_load(config.resolved_yaml())["run"]["dir"] == word
    assert load(tmp_path, config.resolved_yaml()) == config.resolved()


def test_all_problems_are_shown_together(tmp_path: Path) -> None:
    """Every wrong key is named with its line, what was found, and the nearest right key."""
    text = refusal(
        tmp_path,
        """\
model: {hf: dir, dtype: fp16}
data:
  text: [a]
  micro_bath: 2
  shuffle: no
optimizer: {lr: fast, clip_nrom: 1}
steps: 5
train:
  sed: 1
memory:
  host: 4
""",
        "store.chunk=[]",
    )
    for line in (
        "line 1: model.dtype: found the text 'fp16'; choose 'float32', 'bfloat16' or 'float16'",
        "line 4: data.micro_bath: unknown key; did you mean data.micro_batch?",
        "line 5: data.shuffle: found the text 'no'; wanted true or false",
        "line 6: optimizer.lr: found the text 'fast'; wanted a number",
        "line 7: steps: unknown key; did you mean train.steps?",
        "line 9: train.sed: unknown key; did you mean train.seed?",
        "line 11: memory.host: the size 4 has no unit: say 4GiB",
        "command line: store.chunk: found a list; wanted a size",
        "run: missing; add the section run, with the keys dir",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=-1", "train.steps: is -1; it must be 0 or more"),
        ("train.epochs=2", "train: give exactly one of steps, epochs (found steps and epochs)"),
        ("train.steps=2.5", "found the number 2.5; wanted a whole number"),
        ("train.steps=true", "found true; wanted a whole number"),
        ("train.steps=", "train: give steps, such as train.steps=100, or epochs"),
        ("data.micro_batch=-1", "must be 1 or more"),
        ("data.micro_batches=0", "must be 1 or more"),
        ("data.text=[]", "is an empty list"),
        ("data.text=[3]", "wanted a list of globs"),
        (
            "data.text=null",
            "data: give exactly one of text, chat, tokens, python (found none of them)",
        ),
        ("data.tokens=a.bin", "(found text and tokens)"),
        ("data.kwargs={a: 1}", "kwargs belong to python"),
        ("data.kwargs=3", "wanted a mapping"),
        ("model.python=a.b:c", "give exactly one of hf, python"),
        ("model.hf=null", "found none of them"),
        ("model.hf={hidden_size: 3}", "needs model_type"),
        ("model.python=factory", "wanted package.module:name"),
        ("optimizer.lr=0", "must be greater than 0"),
        ("optimizer.lr=.inf", "wanted a finite number"),
        ("optimizer.lr=1e999", "wanted a finite number"),
        ("optimizer.lr=.nan", "NaN is not a value"),
        ("optimizer.clip_norm=0", "must be greater than 0"),
        ("optimizer.clipnorm=1", "did you mean optimizer.clip_norm?"),
        ("optimizer.learning_rate=1", "did you mean optimizer.lr?"),
        ("optimizer.schedule.name=cosin", "choose 'constant', 'linear', 'cosine' or 'wsd'"),
        ("optimizer.schedule=cosine", "wanted a mapping of keys (name, warmup_steps"),
        ("optimizer.schedule.min_lr_ratio=2", "must lie between 0 and 1"),
        ("memory.host=0GiB", "must be greater than 0"),
        ("memory.host=4G", "say 4GiB"),
        ("store.chunk=1000KB", "command line: store.chunk: found 1000000B; it must be a multiple"),
        ("store.chunk=4KiB", "from 8KiB to 1GiB"),
        ("store.chunk=2GiB", "from 8KiB to 1GiB"),
        ("store.commit.every=0", "store.commit.every: is 0; it must be 1 or more"),
        ("store.commit.lag=3", "store.commit.lag: found the number 3; choose"),
        ("eval={text: [a], every: 0}", "eval.every: is 0"),
        ("eval={every: 5}", "eval names no data: give one of"),
        ("device=gpu", "choose auto, cpu, cuda or cuda:N"),
        ("run.dir=2024", "put quotes around it"),
        ("run.dir=''", "is empty text"),
        ("run=x", "wanted a mapping of keys (dir, trace, memory, log_every)"),
        ("run.dir.x=1", "run.dir is a value, and has no keys inside"),
        ("train.steps", "write key.sub=value"),
        ("=3", "write key.sub=value"),
        ("train..steps=3", "write key.sub=value"),
        ("train.steps=[", "override 'train.steps=['"),
        ("run.dir=!!python/name:os.system x", "tag"),
        ('run.dir="a\\0b"', "NUL"),
        ("run.dir=\ud800", "not allowed"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, override: str, message: str) -> None:
    """Each wrong value is refused with what was found and what is wanted."""
    assert message in refusal(tmp_path, BASE, override)


def test_a_device_budget_on_the_cpu_is_refused(tmp_path: Path) -> None:
    """`memory.device` means nothing on a CPU, so it is not silently ignored."""
    text = refusal(tmp_path, BASE, "device=cpu", "memory.device=2GiB")
    assert "memory.device is 2.0 GiB, but device is cpu" in text
    assert load(tmp_path, BASE, "device=cuda:1", "memory.device=2GiB").memory.device == 2**31


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("[1, 2]", "a config is a mapping of sections"),
        ("model: {hf: [}", r"job.yaml:1:14: YAML syntax error"),
        ("model:\n\thf: x", r"job.yaml:2:1: .*not tabs"),
        ("train: {steps: 1, steps: 2}", r"job.yaml:1: the key train.steps is given twice"),
        ("a: 1\nb: 2\na: 3", r"job.yaml:3: the key a is given twice \(first in line 1\)"),
        ("a: 1\n---\nb: 2", "YAML syntax error"),
        ("a: *b", "undefined alias"),
        (b"a: \xff\xfe", "not UTF-8 text .byte 3 is 0xff"),
        ("a: \x07", "U.0007"),
        ("? [a]\n: b", "a key must be a plain word"),
        ("&a [*a]", "nested too deeply"),
        ("a: " + "[" * 70 + "]" * 70, "nested too deeply"),
        (BOMB, "more than 200,000 values"),
        ("[" * 5000, "nested too deeply"),
        ('a: "\\UFFFFFFFF"', "syntax error"),
        ("a: " + "9" * 400, "digits"),
        (b"#" * (4 * 2**20 + 1), "larger than 4 MiB"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str | bytes, message: str) -> None:
    """A file that is not YAML, not text, or not a mapping gets one message with its place."""
    assert re.search(message, refusal(tmp_path, text))


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    """A missing file and a directory are told apart."""
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "missing.yaml", [])
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path, [])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Path("a\0b"), [])


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["4GiB", "3e-4", "no", "a.b:c", "cpu", "cuda:0", "bfloat16", "x.txt", "\u2028"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = sorted(known_keys(Config))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    garbage=st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")),
        st.text("ab:-[]{}&*!?|>'\"#%@,\n \t019.", max_size=60).map(str.encode),
    )
)
@example(garbage=b"!!set {a}")
@example(garbage=b"!!int a")
@example(garbage=b"<<: {a: 1}")
@example(garbage=b"{? {a: b} : c}")
@example(garbage=b"\xef\xbb\xbfa: 1")
def test_garbage_never_escapes(tmp_path: Path, garbage: bytes) -> None:
    """Whatever bytes a file holds, it loads or is refused with a ConfigError."""
    assert refusal(tmp_path, garbage)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), data=st.data())
def test_any_values_load_or_are_refused(
    tmp_path: Path, values: dict[str, Any], data: st.DataObject
) -> None:
    """Any values in any keys load to a config that its own YAML gives back, or are refused."""
    overrides = [f"{key}={yaml.safe_dump(value)}" for key, value in values.items()]
    overrides += data.draw(st.lists(st.text(max_size=20), max_size=1))
    try:
        config = load(tmp_path, BASE, *overrides)
    except ConfigError:
        return
    text = config.resolved_yaml()
    assert load(tmp_path, text) == config.resolved()
    assert load(tmp_path, text).resolved_yaml() == text
    assert changes(config, config).refused == ()


PLAIN_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=8)
PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        PLAIN_TEXT,
        st.from_regex(r"[-+]?[0-9][0-9._:eExa-f-]{0,8}", fullmatch=True),
        st.sampled_from(["no", "on", "Null", "~", "", "=", "<<", "0b11", "2024-01-01", "a\nb\tc"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(kwargs=st.dictionaries(PLAIN_TEXT, PLAIN, max_size=3))
def test_free_values_survive_being_written(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    """Arguments of the user's own functions arrive as they are, also from the resolved config."""
    written = json.dumps(kwargs, ensure_ascii=False)
    config = load(tmp_path, BASE, "model={python: 'a:b'}", f"model.kwargs={written}")
    assert config.model.kwargs == kwargs
    again = load(tmp_path, config.resolved_yaml())
    assert repr(again.model.kwargs) == repr(kwargs)
    assert again == config.resolved()


def groups(tmp_path: Path, old: Sequence[str], new: Sequence[str]) -> tuple[list[str], ...]:
    """Return the dotted keys of the three groups of changes between two sets of overrides."""
    found = changes(load(tmp_path, BASE, *old), load(tmp_path, BASE, *new))
    return tuple([c.key for c in g] for g in (found.free, found.acceptable, found.refused))


@pytest.mark.parametrize(
    ("override", "group"),
    [
        ("memory.host=8GiB", 0),
        ("memory.device=8GiB", 0),
        ("run.dir=elsewhere", 0),
        ("train.steps=500", 0),
        ("data.cache=/tmp/cache", 0),
        ("store.paths=[/a, /b]", 0),
        ("optimizer.lr=1e-3", 1),
        ("optimizer.weight_decay=0.2", 1),
        ("optimizer.schedule.name=linear", 1),
        ("optimizer.schedule.decay_steps=300", 1),
        ("optimizer.clip_norm=1", 2),
        ("optimizer.eps=1e-6", 2),
        ("optimizer.name=sgd", 2),
        ("model.dtype=bfloat16", 2),
        ("model.hf.hidden_size=128", 2),
        ("data.micro_batch=2", 2),
        ("data.shuffle=false", 2),
        ("train.seed=1", 2),
        ("train.threads=1", 2),
        ("memory.segment=1GiB", 2),
        ("store.chunk=1MiB", 2),
        ("store.commit.every=2", 2),
        ("store.commit.lag=1", 0),
        ("device=cpu", 2),
    ],
)
def test_each_change_is_in_its_group(tmp_path: Path, override: str, group: int) -> None:
    """A changed key is found under its dotted name in the group that the design gives it."""
    expected: tuple[list[str], ...] = ([], [], [])
    expected[group].append(override.partition("=")[0])
    assert groups(tmp_path, [], [override]) == expected


def test_eval_may_come_and_go(tmp_path: Path) -> None:
    """Evaluation never changes what is trained, so it is free to change."""
    with_eval = ["eval.every=5", "eval.text=a"]
    assert groups(tmp_path, [], with_eval) == (["eval"], [], [])
    assert groups(tmp_path, with_eval, [*with_eval, "eval.every=7"]) == (["eval.every"], [], [])


def test_the_first_steps_stay_the_schedules(tmp_path: Path) -> None:
    """More steps on resume do not stretch a schedule whose decay_steps was left open."""
    recorded = load(tmp_path, load(tmp_path).resolved_yaml())
    longer = load(tmp_path, BASE, "train.steps=500")
    assert [change.key for change in changes(recorded, longer).free] == ["train.steps"]
    going_on = with_recorded(recorded, longer)
    assert going_on.train.steps == 500
    assert going_on.optimizer.schedule.decay_steps == 200
    again = check_resume(going_on, load(tmp_path, BASE, "train.steps=900"), accept_change=False)
    assert again.optimizer.schedule.decay_steps == 200


def test_resuming_with_other_keys_is_refused_by_name(tmp_path: Path) -> None:
    """A refusal names each key with both values, and the acceptable ones need the option."""
    old = load(tmp_path)
    with pytest.raises(ConfigError, match=r"train.seed: 0 -> 1\n  store.chunk: null -> 1MiB"):
        check_resume(
            old, load(tmp_path, BASE, "train.seed=1", "store.chunk=1MiB"), accept_change=True
        )
    new = load(tmp_path, BASE, "optimizer.lr=1e-3")
    refusal = r"trains with other values .*\n  optimizer.lr: 0.0003 -> 0.001\n.*--accept-change"
    with pytest.raises(ConfigError, match=refusal):  # not "was created with": it may have changed
        check_resume(old, new, accept_change=False)
    # A run that was begun before it could be chosen weighs micro-batches alike.
    expected = load(tmp_path, BASE, "optimizer.lr=1e-3", "train.loss_weighting=micro_batches")
    assert check_resume(old, new, accept_change=True) == expected.resolved()


def test_the_reference_is_up_to_date() -> None:
    """docs/config.md is what the code generates, and every key is in it."""
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    assert page == config_reference.markdown(), (
        "run python -m swaptrain.config.reference > docs/config.md"
    )
    assert all(f"`{key}`" in page for key in KEYS)
