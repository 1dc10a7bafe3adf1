"""Lookups ahead of their step on more than two ranks, where a sum has an order: to the bit the synchronous loop."""

from tests.sok.ahead_cases import compare

CASES = {
    "keys": ("adam", 2, {"seed": 1}),
    "uneven": ("lazy", 3, {"rows": True, "fewer": 1, "seed": 3}),
}


def check_ahead_on_three_ranks(world, tmp_path_of_rank):
    for case, (optimizer, depth, options) in CASES.items():
        folder = tmp_path_of_rank.parent / "ahead_of_three" / case  # they save together
        compare(optimizer, True, depth, ["evaluate", "save", "nothing"], folder, world.rank, world.size, **options)
