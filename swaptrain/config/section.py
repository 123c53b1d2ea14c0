"""The base of all sections of a config, and the name that a key has in YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

__all__ = ["Section", "key_names", "key_of"]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def _exactly_one(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of {', '.join(names)} (found {found})")


def key_of(name: str, field: FieldInfo) -> str:
    """Return the key of a field: its name, or another one where that is a word of Python."""
    return field.alias or name


def key_names(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys of a section, in order."""
    return tuple(key_of(name, field) for name, field in section.model_fields.items())
