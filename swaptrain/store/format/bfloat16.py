"""bfloat16 for zarr-python, which does not have it: the name that tensorstore reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import data_type_registry

__all__ = ["BFloat16", "numpy_dtype", "register"]

_DTYPE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat[Any, Any]):
    """The data type `bfloat16` of zarr-extensions, held in numpy as `ml_dtypes.bfloat16`."""

    dtype_cls = type(_DTYPE)
    _zarr_v3_name = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return 2

    def to_native_dtype(self) -> Any:
        """Return the numpy dtype: little endian, as every machine that torch runs on."""
        return _DTYPE


def register() -> None:
    """Make bfloat16 known to zarr-python in this process; doing it twice does no harm."""
    data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of torch's and zarr's common name."""
    return _DTYPE if name == "bfloat16" else np.dtype(name)
