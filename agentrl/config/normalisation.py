"""What is subtracted from rewards or advantages and what they are divided by. The names are AReaL's."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Level = Literal["batch", "group"]


class NormConfig(BaseModel):
    """Normalisation of values, over the batch or within each group."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    mean_level: Level | None = "batch"
    """Subtract the mean of the batch, of the group, or (null) nothing."""
    mean_leave1out: bool = False
    """Leave the value itself out of that mean."""
    std_level: Level | None = "batch"
    """Divide by the standard deviation of the batch, of the group, or (null) by nothing."""
    std_unbiased: bool = True
    """Standard deviation with Bessel's correction."""
    eps: float = Field(default=1e-5, gt=0)
    """Added to the standard deviation."""
