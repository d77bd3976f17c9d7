"""The cost model learns what steps take, whatever its first measurement said."""

from __future__ import annotations

import random

import pytest

from slipstream.engine.cost_model import CostModel, StepShape


def true_cost(shape: StepShape) -> float:
    return 5 + 24 * shape.tiles + 0.8 * shape.attention


def fitted(disturbance: float) -> CostModel:
    """A model whose first measurement was slowed down by a factor."""
    shapes = [StepShape(1, 4.0), StepShape(2, 8.0), StepShape(1, 36.0)]
    times = [true_cost(shape) for shape in shapes]
    return CostModel.fit(*zip(shapes, [times[0] * disturbance, *times[1:]], strict=True))


@pytest.mark.parametrize("disturbance", [1.0, 2.0, 4.0, 0.5])
def test_it_learns_under_any_first_measurement(disturbance: float) -> None:
    costs, chance = fitted(disturbance), random.Random(1)
    for _ in range(300):
        shape = StepShape(chance.randrange(1, 5), chance.uniform(1, 60))
        costs.observe(shape, true_cost(shape) * chance.uniform(0.95, 1.05))
    for tiles in (1, 2, 4):
        for attention in (2.0, 20.0, 60.0):
            shape = StepShape(tiles, attention)
            # A little too much costs a few rows a step; too little would break the promised step time.
            assert 0.75 <= costs.predict(shape) / true_cost(shape) <= 1.9


def test_an_undisturbed_fit_is_right_at_once() -> None:
    shape = StepShape(3, 30.0)
    assert fitted(1.0).predict(shape) == pytest.approx(true_cost(shape), rel=0.05)


def test_a_slower_machine_is_noticed_within_a_few_steps() -> None:
    costs = fitted(1.0)
    shape = StepShape(2, 10.0)
    for _ in range(12):
        costs.observe(shape, 2 * true_cost(shape))
    assert costs.predict(shape) >= 1.8 * true_cost(shape)


def test_a_first_measurement_far_too_high_is_forgotten() -> None:
    costs = CostModel(500.0, 5000.0, 100.0)
    shape = StepShape(1, 5.0)
    for _ in range(25):
        costs.observe(shape, true_cost(shape))
    assert costs.predict(shape) <= 1.6 * true_cost(shape)


@pytest.mark.parametrize("disturbance", [1.0, 3.0])
def test_steps_without_tiles_are_a_base_and_rows(disturbance: float) -> None:
    def cost(shape: StepShape) -> float:
        return 2 + 0.2 * shape.tiles + 0.05 * shape.attention

    shapes = [StepShape(1, 1.0), StepShape(16, 16.5), StepShape(128, 160.0), StepShape(16, 144.5)]
    times = [cost(shape) for shape in shapes]
    costs = CostModel.fit_rows(*zip(shapes, [times[0] * disturbance, *times[1:]], strict=True))
    for shape in (StepShape(1, 9.0), StepShape(64, 70.0), StepShape(512, 1024.0)):
        assert 0.95 <= costs.predict(shape) / cost(shape) <= 1.05 * disturbance
