"""The receive that waits until somebody looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

from vllm_spd.worker.cpu_worker import receive_when_needed


def group(custom: bool, calls: list[Any]) -> Any:
    def receive(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return {"hidden_states": torch.ones(2)}, [], []

    return SimpleNamespace(use_cpu_custom_send_recv=custom, irecv_tensor_dict=receive)


def test_nothing_is_received_before_the_tensors_are_looked_at() -> None:
    calls: list[Any] = []
    this = group(True, calls)
    receive_when_needed(this)
    tensors, handles, postprocess = this.irecv_tensor_dict(all_gather_group="tp")
    pending = AsyncIntermediateTensors(tensors, handles, postprocess)
    assert calls == []
    assert dict(pending.items())["hidden_states"].tolist() == [1, 1]
    assert [*pending.tensors] == ["hidden_states"]
    assert calls == [((), {"all_gather_group": "tp"})]


def test_transports_that_do_not_block_are_left_alone() -> None:
    this = group(False, [])
    original = this.irecv_tensor_dict
    receive_when_needed(this)
    assert this.irecv_tensor_dict is original
