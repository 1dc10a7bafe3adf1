"""What a training step of several workers asks of their devices, counted by the emulator."""

import dataclasses

from . import counting


def check_what_a_step_asks_for(world):
    return {features: dataclasses.asdict(counting.of_a_step(features, world.rank)) for features in (1, 58)}


def check_what_a_step_with_ids_of_the_device_asks_for(world):
    return {features: dataclasses.asdict(counting.of_a_step(features, world.rank, True)) for features in (1, 58)}
