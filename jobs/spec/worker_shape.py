"""The section `workers` of a spec: how many workers, the resources of each, and when one that makes no progress is ended."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from decoders.common_settings import Settings


class WorkerShape(Settings):
    """Workers of one kind: how many, and the resources of each; a fraction of a GPU is allowed.

    A worker that makes no progress for `stall_s` seconds is killed, and its units are assigned to others. So is a worker that
    is not up after `start_s` seconds, which include waiting for resources and loading the model. `price_per_hour` is what an
    hour of one such worker costs, in any currency.
    """

    count: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    gpus: Literal["auto"] | Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = "auto"
    cpus: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1
    stall_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 600.0
    start_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1800.0
    price_per_hour: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
