"""Paths as people write them: `~`, `$VAR` and `${VAR}` mean the same in every key and argument."""

from __future__ import annotations

import os
import re
from pathlib import Path

from swaptrain.errors import ConfigError

__all__ = ["cached_model", "expand_argument", "expand_path", "written_path"]

_VARIABLE = re.compile(r"\$(\$|[A-Za-z_][A-Za-z0-9_]*|\{[^}]*\}?)")
_LITERAL = "set it, or write $$ for a name that has a $ in it"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
_HOME = "write ./ before a name that begins with ~"


def cached_model(text: str, *, weights: bool = False) -> str:
    """Return the directory of `org/name` in the hub's local cache; what is none as it is.

    A directory of that name in the current one comes first. Nothing is downloaded. Raises
    ValueError where `weights` are asked for and only other files are there: a run would begin from
    drawn ones.
    """
    if not _HUB_NAME.fullmatch(text) or os.path.exists(text):
        return text
    from huggingface_hub import try_to_load_from_cache

    # timm fetches the last one alone.
    names = ("config.json", "tokenizer.json", "model.safetensors")
    found = [path for n in names if isinstance(path := try_to_load_from_cache(text, n), str)]
    if not found:
        return text
    directory = os.path.dirname(found[0])
    if weights and not any(name.endswith(_WEIGHTS) for name in os.listdir(directory)):
        raise ValueError(
            f"{text} is in the hub's local cache without its weights: hf download {text}"
        )
    return directory


def expand_path(text: str) -> str:
    """Return the path with a leading `~` or `~user` and all variables replaced; `$$` is a `$`.

    Raises ValueError, naming it, for a variable that is not set or a user who is not known. What a
    variable holds is not expanded again, and keeps its meaning as a glob.
    """

    def value(match: re.Match[str]) -> str:
        found = match.group(1)
        if found == "$":
            return "$"
        name = found.strip("{}")
        if found.startswith("{") and not (found.endswith("}") and name.isidentifier()):
            raise ValueError(
                f"found {text!r}, where {match.group()!r} names no variable: {_LITERAL}"
            )
        if not os.environ.get(name):
            state = "empty" if name in os.environ else "not set"
            raise ValueError(f"found {text!r}, and the variable ${name} is {state}: {_LITERAL}")
        return os.environ[name]

    home = ""
    if text.startswith("~"):
        user, slash, rest = text.partition("/")
        home = os.path.expanduser(user)
        if home == user:
            raise ValueError(f"found {text!r}, and there is no user {user[1:]!r}: {_HOME}")
        text = slash + rest
    return home + _VARIABLE.sub(value, text)


def expand_argument(path: Path) -> Path:
    """Return a path of the command line expanded, unless a file of just that name is there.

    A shell has expanded what was not quoted. Raises ConfigError.
    """
    if os.path.lexists(path):
        return path
    try:
        return Path(expand_path(str(path)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def written_path(path: str) -> str:
    """Return how a config has to write a path for `expand_path` to give it back."""
    return ("./" if path.startswith("~") else "") + path.replace("$", "$$")
