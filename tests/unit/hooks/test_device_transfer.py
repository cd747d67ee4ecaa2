"""What layers on another device are given travels there, each tensor once (the devices: cpu and meta)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from elastic.hooks.device_transfer import DeviceTransfer, TransferRouter
from elastic.hooks.forward_state import ForwardState
from elastic.weights.proxy.transfer_cache import TransferCache, moved

CPU, META = torch.device("cpu"), torch.device("meta")


class Weights:
    """As much of a model's weights as routes look at."""

    def __init__(self, count: int) -> None:
        self.layers = [self.layer(CPU) for _ in range(count)]

    @staticmethod
    def layer(device: torch.device) -> Any:
        slots = {"weight": SimpleNamespace(device=CPU)}
        return SimpleNamespace(slots=slots, pool=SimpleNamespace(backend=SimpleNamespace(device=device)))


def devices(value: Any) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [value.device.type]
    return [kind for one in value for kind in devices(one)] if isinstance(value, tuple | list) else []


def test_all_tensors_of_a_call_arrive_and_what_is_none_stays() -> None:
    cache = object()
    args, kwargs = DeviceTransfer(META, META).enter(
        (torch.ones(2), 7), {"mask": torch.ones(3), "rope": (torch.ones(1), torch.ones(1)), "cache": cache}
    )
    assert devices(args) == ["meta"]
    assert args[1] == 7
    assert devices((kwargs["mask"], kwargs["rope"])) == ["meta"] * 3
    assert kwargs["cache"] is cache
    assert moved([torch.ones(1), None], META)[1] is None


def test_what_layers_are_given_alike_travels_once() -> None:
    travel, mask = DeviceTransfer(META, CPU), torch.ones(4)
    first, second = (travel.enter((torch.ones(1),), {"mask": mask})[1]["mask"] for _ in range(2))
    assert first is second
    assert travel.enter((), {"mask": torch.ones(4)})[1]["mask"] is not first


def test_what_was_written_travels_again_and_layers_on_one_device_share_what_came() -> None:
    arrivals, mask = TransferCache(META), torch.ones(4)
    first, second = (DeviceTransfer(META, META, arrivals).enter((), {"mask": mask})[1]["mask"] for _ in range(2))
    assert first is second
    mask.add_(1)
    assert arrivals.bring(mask) is not first
    assert TransferCache(CPU).bring(mask) is mask
    with torch.inference_mode():  # nobody would know
        untold = torch.ones(4)
        assert arrivals.bring(untold) is not arrivals.bring(untold)


def test_a_result_goes_to_the_next_layer_and_a_failure_is_left_alone() -> None:
    assert devices(DeviceTransfer(CPU, META).leave((torch.ones(1), None))) == ["meta"]
    assert DeviceTransfer(CPU, META).leave(None) is None


def test_routes_are_laid_where_devices_differ_and_taken_up_again() -> None:
    weights, forward = Weights(4), ForwardState()
    other: Any = SimpleNamespace()
    forward.interceptors[2] = (other,)
    routes = TransferRouter(weights, forward)
    routes.update()
    assert forward.interceptors == {2: (other,)}
    weights.layers[1] = weights.layer(META)
    weights.layers[2] = weights.layer(META)
    routes.update()
    assert sorted(forward.interceptors) == [0, 1, 2, 3]
    assert forward.interceptors[2][1] is other
    followed = [forward.interceptors[i][0].leave(torch.ones(1)).device for i in range(3)]
    assert [d.type for d in followed] == ["meta", "meta", "cpu"]
    weights.layers[1] = weights.layers[2] = weights.layer(CPU)
    routes.update()
    assert forward.interceptors == {2: (other,)}
