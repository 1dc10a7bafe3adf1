"""Lookups ahead of their step on more than two ranks, where a sum has an order: to the bit the synchronous loop."""

from tests.sok.ahead_cases import compare
from tests.sok.staged_cases import deeprec, same, train

CASES = {
    "keys": ("adam", 2, {"seed": 1}),
    "uneven": ("lazy", 3, {"rows": True, "fewer": 1, "seed": 3}),
}


def check_ahead_on_three_ranks(world, tmp_path_of_rank):
    for case, (optimizer, depth, options) in CASES.items():
        folder = tmp_path_of_rank.parent / "ahead_of_three" / case  # they save together
        compare(optimizer, True, depth, ["evaluate", "save", "nothing"], folder, world.rank, world.size, **options)


def check_sessions_ahead_on_three_ranks(world):
    with deeprec():
        inside, ahead = (train("staged_of_three", world.rank, capacity, "adam") for capacity in (0, 2))
    same(ahead, inside)
