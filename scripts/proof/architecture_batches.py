"""The items that tiny models are trained on: item i of a kind is a function of i alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

__all__ = ["KINDS", "Items", "items", "micro_batch"]

VOCABULARY, LENGTH, CLASSES = 128, 16, 3
IMAGE, IMAGE_SIDE, PADDED = 60, 32, 3
"""The id that stands for an image in a text, the side of an image, and how many ids are padding."""
Item = dict[str, Tensor]


def _ids(g: Generator, length: int = LENGTH, lowest: int = 3, highest: int = VOCABULARY) -> Tensor:
    return torch.randint(lowest, highest, (length,), generator=g)


def _label(g: Generator, classes: int = CLASSES) -> Tensor:
    return torch.randint(0, classes, (), generator=g)


def _text(g: Generator) -> Item:
    ids = _ids(g)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_text(g: Generator) -> Item:
    """Return a text in which every fourth id is hidden (id 3), and the labels are all of them."""
    ids = _ids(g, lowest=4)
    hidden = ids.clone()
    hidden[::4] = 3
    return {"input_ids": hidden, "labels": ids}


def _sequences(g: Generator) -> Item:
    return {"input_ids": _ids(g), "labels": _ids(g, 8)}


def _classified_text(g: Generator) -> Item:
    return {"input_ids": _ids(g), "labels": _label(g)}


def _questions(g: Generator) -> Item:
    places = {key: _label(g, LENGTH) for key in ("start_positions", "end_positions")}
    return {"input_ids": _ids(g), **places}


def _layouts(g: Generator) -> Item:
    corners = torch.randint(0, 500, (LENGTH, 2), generator=g)
    boxes = torch.cat([corners, corners + torch.randint(1, 400, (LENGTH, 2), generator=g)], dim=1)
    labels = torch.randint(0, CLASSES, (LENGTH,), generator=g)
    return {"input_ids": _ids(g), "bbox": boxes, "labels": labels}


def _pixels(g: Generator, side: int = IMAGE_SIDE) -> Tensor:
    return torch.randn(3, side, side, generator=g)


def _images(g: Generator) -> Item:
    return {"pixel_values": _pixels(g), "labels": _label(g)}


def _segmented_images(g: Generator) -> Item:
    labels = torch.randint(0, CLASSES, (IMAGE_SIDE, IMAGE_SIDE), generator=g)
    return {"pixel_values": _pixels(g), "labels": labels}


def _hidden_images(g: Generator) -> Item:
    """Return an image and the numbers by which ViT MAE chooses the patches that it hides."""
    return {"pixel_values": _pixels(g), "noise": torch.rand(16, generator=g)}


def _captions(g: Generator) -> Item:
    ids = _ids(g, highest=VOCABULARY - 1)
    ids[-1] = VOCABULARY - 1  # CLIP reads the text where its end is
    return {"input_ids": ids, "pixel_values": _pixels(g)}


def _speech(g: Generator) -> Item:
    return {"input_features": torch.randn(8, 32, generator=g), "labels": _ids(g, 8)}


def _classified_sound(g: Generator) -> Item:
    return {"input_values": torch.randn(400, generator=g), "labels": _label(g)}


def _transcribed_sound(g: Generator) -> Item:
    return {"input_values": torch.randn(400, generator=g), "labels": _ids(g, 3, 1, 16)}


def _spectrograms(g: Generator) -> Item:
    return {"input_values": torch.randn(32, 16, generator=g), "labels": _label(g)}


def _series(g: Generator) -> Item:
    return {
        "past_values": torch.randn(32, 2, generator=g),
        "future_values": torch.randn(8, 2, generator=g),
    }


def _with_image(tokens: int, more: Callable[[Generator, Tensor], Item]) -> Callable[..., Item]:
    """Return a maker of texts with so many ids for an image in a row, which are no labels."""

    def make(g: Generator) -> Item:
        ids = _ids(g, 24, 3, 50)
        ids[2 : 2 + tokens] = IMAGE
        labels = torch.where(ids == IMAGE, -100, ids)
        return {"input_ids": ids, "labels": labels, **more(g, ids)}

    return make


def _image_16(g: Generator, ids: Tensor) -> Item:
    return {"pixel_values": _pixels(g, 16)}


def _typed_image(g: Generator, ids: Tensor) -> Item:
    """Return an image beside the types of tokens, as Gemma's processors do."""
    return {"pixel_values": _pixels(g, 16), "token_type_ids": (ids == IMAGE).long()}


def _listed_image(g: Generator, ids: Tensor) -> Item:
    return {"pixel_values": _pixels(g, 16)[None]}


def _sized_image(g: Generator, ids: Tensor) -> Item:
    return {"pixel_values": _pixels(g, 16), "image_sizes": torch.tensor([16, 16])}


def _tiled_image(g: Generator, ids: Tensor) -> Item:
    """Return three tiles and the size of the image, as LLaVA-NeXT's processor does."""
    tiles = torch.randn(3, 3, 16, 16, generator=g)
    return {"pixel_values": tiles, "image_sizes": torch.tensor([16, 32])}


def _gridded_image(g: Generator, ids: Tensor) -> Item:
    """Return flat patches and their grid, as Qwen-VL's processors do."""
    return {
        "pixel_values": torch.randn(16, 96, generator=g),
        "image_grid_thw": torch.tensor([1, 4, 4]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


KINDS: dict[str, Callable[[Generator], Item]] = {
    "text": _text,
    "masked text": _masked_text,
    "sequences": _sequences,
    "classified text": _classified_text,
    "questions": _questions,
    "layouts": _layouts,
    "images": _images,
    "segmented images": _segmented_images,
    "hidden images": _hidden_images,
    "captions": _captions,
    "speech": _speech,
    "classified sound": _classified_sound,
    "transcribed sound": _transcribed_sound,
    "spectrograms": _spectrograms,
    "series": _series,
    "image of 4": _with_image(4, _image_16),
    "image of 2": _with_image(2, _image_16),
    "image of 1": _with_image(1, _image_16),
    "typed image": _with_image(4, _typed_image),
    "listed image": _with_image(1, _listed_image),
    "sized image": _with_image(1, _sized_image),
    "tiled image": _with_image(14, _tiled_image),
    "gridded image": _with_image(4, _gridded_image),
}


class Items:
    """A map-style dataset of one kind.

    Of a text with an image every second item is padded at its end: plain PyTorch leaves out a mask
    of ones, which a captured graph cannot.
    """

    def __init__(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Item:
        item = KINDS[self.kind](torch.Generator().manual_seed(index))
        if "image" in self.kind.split():
            mask = torch.ones_like(item["input_ids"])
            if index % 2:
                mask[-PADDED:] = 0
            item["attention_mask"] = mask
        return item


def items(kind: str, length: int = 12) -> Items:
    """Return a dataset: what `data.python` names."""
    return Items(kind, length)


def micro_batch(kind: str, number: int, rows: int) -> Item:
    """Return micro-batch `number`, from 0, of a dataset that is read in order."""
    found = [items(kind)[number * rows + row] for row in range(rows)]
    return {key: torch.stack([item[key] for item in found]) for key in found[0]}
