"""Special tokens that stand in a document are text, for every model of the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from swaptrain.config.data import DataConfig
from swaptrain.data import open_data
from swaptrain.data.tokenizer import HuggingFaceTokenizer, open_tokenizer
from swaptrain.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIGNS = "<>|[]/!"


def bpe(merges: bool) -> Tokenizer:
    """Bytes; with merges that make the end token out of plain text."""
    words = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "en",
        "end",
        "<|",
        "|>",
        "<|end",
        "<|end|>",
    ]
    pairs = [("e", "n"), ("en", "d")]
    if merges:
        pairs += [("<", "|"), ("|", ">"), ("<|", "end"), ("<|end", "|>")]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    made.decoder = decoders.ByteLevel()
    return made


def whole_words() -> Tokenizer:
    """A BPE that takes whole words of its vocabulary first, as Llama 3's does."""
    words = [*LETTERS, *SIGNS, "<|end|>", "<unk>"]
    made = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[],
            ignore_merges=True,
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def word_piece() -> Tokenizer:
    words = ["[UNK]", "<|end|>", *LETTERS, *SIGNS, *(f"##{c}" for c in LETTERS + SIGNS), "the"]
    made = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def unigram() -> Tokenizer:
    """Its special pieces are pieces of the model with the best score."""
    pieces = [("<unk>", 0.0), ("<|end|>", 0.0), *((c, -4.0) for c in "▁" + LETTERS + SIGNS)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def word_level() -> Tokenizer:
    words = ["<unk>", "<|end|>", "the", "of", "ends"]
    made = Tokenizer(models.WordLevel(vocab={w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


MODELS: dict[str, Callable[[], Tokenizer]] = {
    "bpe": lambda: bpe(False),
    "bpe that merges it": lambda: bpe(True),
    "whole words": whole_words,
    "word piece": word_piece,
    "unigram": unigram,
    "word level": word_level,
}
TEXT = "the <|end|> ends x<|end|>y<|end|>\n<tool> of <|end|>"


def saved(tokenizer: Tokenizer, directory: Path, **settings: Any) -> Path:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", **settings})
    )
    return directory


def ids(tokenizer: HuggingFaceTokenizer, text: str, directory: Path) -> list[int]:
    file = directory / "document.txt"
    file.write_text(text, encoding="utf-8")
    [document] = tokenizer.documents([file])
    return [int(i) for piece in document for i in piece]


@pytest.mark.parametrize("declared", ["special", "by the config", "in the config's table"])
@pytest.mark.parametrize("name", MODELS)
def test_a_document_never_holds_the_end_token(name: str, declared: str, tmp_path: Path) -> None:
    """However it is declared, its text is what a tokenizer without that word makes of it.

    An added token that nothing calls special (`<tool>`) stays the word that it is.
    """
    made = MODELS[name]()
    end = made.get_vocab()["<|end|>"]
    plain = made.to_str()
    made.add_tokens(["<tool>"])
    tool = made.token_to_id("<tool>")
    settings: dict[str, Any] = {}
    if declared == "special":
        made.add_special_tokens(["<|end|>", "<extra>"])
    elif declared == "by the config":
        made.add_tokens([AddedToken("<|end|>", normalized=False)])
        settings = {"additional_special_tokens": ["<extra>"]}
    else:
        made.add_tokens([AddedToken("<|end|>", normalized=False)])
        settings = {"added_tokens_decoder": {str(end): {"content": "<|end|>", "special": True}}}
    directory = saved(made, tmp_path / "tok", **settings)
    text = open_tokenizer(directory)
    parsed = open_tokenizer(directory, parse_special=True)
    assert isinstance(text, HuggingFaceTokenizer)
    assert isinstance(parsed, HuggingFaceTokenizer)
    assert text.end_token == parsed.end_token == end
    assert text.vocabulary == parsed.vocabulary
    assert text.digest != parsed.digest
    found = ids(text, TEXT, directory)
    assert end not in found
    assert found.count(tool) == 1
    assert ids(parsed, TEXT, directory).count(end) == 4
    # Without the word in its vocabulary the plain library gives the same, under other ids.
    tree = json.loads(plain)
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary["\ufdd5"] = vocabulary.pop("<|end|>")
    else:
        vocabulary[end][0] = "\ufdd5"
    merges = tree["model"].get("merges")
    if merges:
        tree["model"]["merges"] = [m for m in merges if "".join(m) != "<|end|>"]
    without = Tokenizer.from_str(json.dumps(tree))
    without.add_tokens(["<tool>"])
    assert found == without.encode(TEXT, add_special_tokens=False).ids
    for harmless in ("the end of it", "", "<|en", "the <| end |>"):
        expected = made.encode(harmless, add_special_tokens=False).ids
        assert ids(text, harmless, directory) == expected


def test_transformers_splits_special_tokens_alike(tmp_path: Path) -> None:
    """Where the library's own switch is enough, the ids are those of split_special_tokens."""
    from transformers import PreTrainedTokenizerFast

    made = bpe(False)
    made.add_special_tokens(["<|end|>"])
    directory = saved(made, tmp_path / "tok")
    plain = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|end|>"
    )
    text = open_tokenizer(directory)
    assert isinstance(text, HuggingFaceTokenizer)
    expected = plain(TEXT, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids(text, TEXT, directory) == expected


def test_the_unknown_word_may_still_come(tmp_path: Path) -> None:
    """It is special, and still what the model gives for other characters, not for its name."""
    made = word_piece()
    made.add_special_tokens(["[UNK]", "<|end|>"])
    directory = saved(made, tmp_path / "tok", unk_token="[UNK]")
    text = open_tokenizer(directory)
    assert isinstance(text, HuggingFaceTokenizer)
    unknown = made.token_to_id("[UNK]")
    assert ids(text, "the é", directory) == [made.token_to_id("the"), unknown]
    assert len(ids(text, "[UNK]", directory)) == 5


def test_the_key_decides_and_is_part_of_the_cache(
    tmp_path: Path, data_config: Callable[..., DataConfig]
) -> None:
    """One cache holds both tokenisations; a run that began with one refuses the other."""
    made = bpe(False)
    made.add_special_tokens(["<|end|>"])
    end = made.token_to_id("<|end|>")
    (tmp_path / "a.txt").write_text("of <|end|> here" * 9)
    counts = []
    for parse in (False, True):
        config = data_config(
            text=[str(tmp_path / "a.txt")], cache=str(tmp_path / "cache"), parse_special=parse,
            tokenizer=str(saved(made, tmp_path / f"tok-{parse}")), sequence_length=20,
        )  # fmt: skip
        data = open_data(config, seed=0, run_dir=tmp_path / f"run-{parse}", model_vocabulary=None)
        steps = range(1, len(data) + 1)
        counts.append(sum((data.batch(s, 0)["input_ids"] == end).sum().item() for s in steps))
        if parse:
            with pytest.raises(ConfigError, match=r"the tokenizer .* has changed"):
                open_data(config, seed=0, run_dir=tmp_path / "run-False", model_vocabulary=None)
    assert counts[0] == 0
    assert counts[1] >= 8


def test_signs_that_a_config_takes_for_padding_stay_signs(tmp_path: Path) -> None:
    """A `!` for padding is a word of texts; one character that ends documents is refused."""
    made = bpe(False)
    made.add_special_tokens(["<|end|>"])
    directory = saved(made, tmp_path / "tok", pad_token="!", mask_token="end")
    text = open_tokenizer(directory)
    assert isinstance(text, HuggingFaceTokenizer)
    found = ids(text, "the end!", directory)
    assert found == made.encode("the end!", add_special_tokens=False).ids
    newline = saved(made, tmp_path / "newline", pad_token=None)
    (newline / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    with pytest.raises(ConfigError, match=r"cannot be told from text: set data\.parse_special"):
        open_tokenizer(newline)
    assert open_tokenizer(newline, parse_special=True).end_token == made.token_to_id("!")
