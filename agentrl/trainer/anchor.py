"""The weights of an earlier moment, to look back with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Anchor:
    """A copy of a model's trained weights, taken when they were last published."""

    def __init__(self, model: Any) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def take(self) -> None:
        """Keeps the weights as they are now."""
        for kept, parameter in zip(self._kept, self._parameters, strict=True):
            kept.copy_(parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the kept weights for the duration of a block; no gradient may be taken in it."""
        current = [parameter.data for parameter in self._parameters]
        try:
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                parameter.data = kept
            yield
        finally:
            for parameter, data in zip(self._parameters, current, strict=True):
                parameter.data = data
