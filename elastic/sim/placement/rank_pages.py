"""The pages of a simulated rank, as `elastic estimate` counts them."""

from __future__ import annotations

from elastic.errors import ConfigError
from elastic.estimation.estimate import Estimator
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import Device
from elastic.sim.core.instance import PlacePages


def rank_pages(
    estimator: Estimator, configuration: Configuration, layers: range, device: Device, requests: int
) -> PlacePages:
    """Return the memory of a rank with some layers that has all of a device's, for batches of so many requests.

    Raises `ConfigError` for a model with several forms of attention, and where no room is left for keys and values.
    """
    groups = estimator.room(estimator.layout.kv_shape(configuration.kv), configuration.tp, layers).groups
    if len(groups) != 1 or groups[0][0] is not None:
        raise ConfigError("model: layers with a sliding window are not simulated; take one whose layers are all alike")
    (_, sector, blocks) = groups[0]
    page = estimator.pages.page_bytes
    held = estimator.rank(device, layers, configuration, requests)
    budget = device.memory_bytes // page
    own = budget - held.kv // page
    layer = estimator.pages.layers(layers, configuration.weights, configuration.tp) // len(layers)  # in the mean
    if budget - own < sector:
        raise ConfigError(f"model: it needs {own} of {budget} pages, which leaves no room for keys and values")
    return PlacePages(budget, own, sector, blocks, len(layers), layer)
