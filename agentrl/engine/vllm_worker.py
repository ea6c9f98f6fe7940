"""What agentrl adds to the workers of a vLLM older than 0.32, whose own weight updates differ from release to release.

vLLM mixes it into its worker's class (`worker_extension_cls`), whichever that is, and calls it by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from agentrl.engine.vllm_weights import ModelUpdate
from agentrl.weights.bucket import tensor_checksums


class WeightUpdates:
    """The steps of an update, and what the weights are after it."""

    device: torch.device
    vllm_config: Any
    model_runner: Any

    @cached_property
    def agentrl_update(self) -> ModelUpdate:
        return ModelUpdate(self.model_runner.get_model(), self.vllm_config, self.device)

    def agentrl_join(self, group: str) -> None:
        self.agentrl_update.join(group)

    def agentrl_start(self) -> None:
        with self._agentrl_loading():
            self.agentrl_update.start_weight_update()

    def agentrl_receive(self, bucket: str) -> None:
        with self._agentrl_loading():
            self.agentrl_update.receive(bucket)
            torch.accelerator.synchronize()  # the next step uses them

    def agentrl_finish(self) -> None:
        with self._agentrl_loading():
            self.agentrl_update.finish_weight_update()
            torch.accelerator.synchronize()

    def agentrl_checksums(self) -> dict[str, str]:
        return tensor_checksums(self.model_runner.get_model().named_parameters())

    @contextmanager
    def _agentrl_loading(self) -> Iterator[None]:
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            yield
