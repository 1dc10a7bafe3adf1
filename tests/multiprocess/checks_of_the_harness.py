"""Checks whose outcomes test_failures.py knows."""


def check_returns_its_rank(world):
    return world.rank


def check_fails_on_rank_1(world):
    assert world.rank != 1, "only on rank 1"
