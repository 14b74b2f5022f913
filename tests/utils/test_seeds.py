from vllm.utils.seeds import _mix64, derive_seed, request_seed


def test_mix64_is_the_output_function_of_splitmix64():
    # The generator's first two numbers from state 0, as published.
    golden_gamma = 0x9E3779B97F4A7C15
    assert _mix64(golden_gamma) == 0xE220A8397B1DCDAF
    assert _mix64(2 * golden_gamma) == 0x6E789E6AA1B965F4


def test_child_zero_keeps_the_seed():
    assert derive_seed(-7, 0) == -7


def test_children_have_seeds_of_their_own():
    seeds = {derive_seed(seed, i) for seed in (0, 1, -1, 2**63 - 1) for i in range(50)}
    assert len(seeds) == 200
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_a_request_keeps_its_drawn_seed_and_shares_it_with_nobody():
    assert request_seed(1, "a") == request_seed(1, "a")
    assert len({request_seed(1, "a"), request_seed(1, "b"), request_seed(2, "a")}) == 3
    assert 0 <= request_seed(-5, "a") < 2**63
