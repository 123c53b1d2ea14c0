"""The architectures that are tried, by name; the files that are imported here describe them."""

from __future__ import annotations

from architecture_fields import Architecture
from architecture_senses import PICTURES_AND_SOUND
from architecture_texts import DECODERS, ENCODER_DECODERS, ENCODERS
from architecture_vision_language import VISION_LANGUAGE

__all__ = ["ARCHITECTURES", "Architecture"]

ARCHITECTURES: dict[str, Architecture] = {
    **DECODERS,
    **ENCODERS,
    **ENCODER_DECODERS,
    **PICTURES_AND_SOUND,
    **VISION_LANGUAGE,
}
