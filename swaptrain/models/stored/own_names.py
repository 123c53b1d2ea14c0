"""Which tensors of a checkpoint are a module's: by the module's own names, and by no other rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from swaptrain.errors import ConfigError
from swaptrain.models.freeze import nearest
from swaptrain.models.stored.checkpoint import Checkpoint
from swaptrain.units import how_many

__all__ = ["OwnNames", "listed"]

_MOST = 3
"""How many names a message lists."""


@dataclass(frozen=True)
class OwnNames:
    """Finds each tensor of a module in a checkpoint, and refuses one that does not fit it.

    The names are those of the module's state dict, or of one module inside of it.
    """

    except_: Sequence[str] = ()
    """Globs of names, the module's or the checkpoint's, that are not taken from it."""

    def find(
        self, places: Mapping[str, Tensor], checkpoint: Checkpoint
    ) -> tuple[dict[str, str], list[str]]:
        """Return the checkpoint's names by the module's, and what a user should know.

        `places` is the module's state dict, in which tied tensors are one object. Raises
        ConfigError where a tensor is missing, has no place or has another shape, where a glob
        matches nothing, and where several modules have the checkpoint's names.
        """
        inner = _inner_module(places, checkpoint)
        sources = {inner + source: source for source in checkpoint.tensors}
        left_out = self._left_out(places, sources)
        tied: dict[int, list[str]] = {}
        for name, place in places.items():
            tied.setdefault(id(place), []).append(name)
        begun = {n for group in tied.values() if left_out.intersection(group) for n in group}
        found = {n: s for n, s in sources.items() if n in places and n not in begun}
        _check(places, found, sources.keys() - left_out, begun, tied.values(), checkpoint)
        remarks = []
        if inner:
            remarks.append(f"the names in {checkpoint.directory} are those of {inner[:-1]}")
        if begun:
            names = listed(n for n in places if n in begun)
            remarks.append(f"not taken from {checkpoint.directory}: {names}")
        return found, remarks

    def _left_out(self, places: Iterable[str], sources: Mapping[str, str]) -> set[str]:
        """Return the names that a glob matches, as the module has or would have them."""
        names = {**{name: name for name in places}, **sources}
        left_out: set[str] = set()
        for pattern in self.except_:
            matched = {
                name
                for name, source in names.items()
                if fnmatchcase(name, pattern) or fnmatchcase(source, pattern)
            }
            if not matched:
                raise ConfigError(
                    f"model.weights_except: {pattern!r} matches no tensor; "
                    f"{nearest(pattern, list(names))}"
                )
            left_out |= matched
        return left_out


def _inner_module(places: Iterable[str], checkpoint: Checkpoint) -> str:
    """Return the path, with a dot behind it, of the module whose names a checkpoint has most of.

    Empty for the whole module.
    """
    counts: Counter[str] = Counter()
    for name in places:
        begin = 0
        while begin >= 0:
            if name[begin:] in checkpoint.tensors:
                counts[name[:begin]] += 1
            begin = name.find(".", begin) + 1 or -1
    most = max(counts.values(), default=0)
    best = [path for path, count in counts.items() if count == most]
    if "" in best or not best:
        return ""
    if len(best) > 1:
        raise ConfigError(
            f"model.weights: the names in {checkpoint.directory} are those of "
            f"{' and of '.join(path[:-1] for path in best[:_MOST])}: save them under the names of "
            "the whole model"
        )
    return best[0]


def _check(
    places: Mapping[str, Tensor],
    found: Mapping[str, str],
    stored: Iterable[str],
    begun: set[str],
    tied: Iterable[Sequence[str]],
    checkpoint: Checkpoint,
) -> None:
    """Raise ConfigError unless model and checkpoint have the same tensors, all but `begun`."""
    lost = [group[0] for group in tied if not (begun | found.keys()).intersection(group)]
    unknown = sorted(name for name in stored if name not in places)
    shapes = {name: checkpoint.tensors[source].shape for name, source in found.items()}
    others = [name for name, shape in shapes.items() if shape != tuple(places[name].shape)]
    said = []
    if others:
        name = others[0]
        more = f", and so with {listed(others[1:])}" if others[1:] else ""
        said.append(
            f"has {name} in the shape {shapes[name]}, the model in "
            f"{tuple(places[name].shape)}{more}"
        )
    if lost:
        said.append(
            f"lacks {len(lost)} of the model's {how_many(len(places), 'tensor')}: {listed(lost)}"
        )
    if unknown:
        said.append(f"holds {len(unknown)} that the model has no place for: {listed(unknown)}")
    if said:
        name = [*others, *lost, *unknown][0]
        glob = f"{name.rpartition('.')[0]}.*" if "." in name else name
        raise ConfigError(
            f"model.weights: {checkpoint.directory} {'; it '.join(said)}. Give the weights of this "
            "model, or name what shall begin as the factory makes it, and what is to be left out: "
            f'model.weights_except: ["{glob}"]'
        )


def listed(names: Iterable[str]) -> str:
    """Return the first names of many, and how many more there are."""
    first = [name if name.isprintable() else repr(name) for name in names]
    more = f" and {len(first) - _MOST} more" if len(first) > _MOST else ""
    return ", ".join(first[:_MOST]) + more
