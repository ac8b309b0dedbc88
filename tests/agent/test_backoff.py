from perdure.base.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_a_success_resets_them() -> None:
    backoff = Backoff(0.5, 3)
    assert [backoff.next_pause() for _ in range(5)] == [0.5, 1, 2, 3, 3]
    backoff.reset()
    assert backoff.next_pause() == 0.5


def test_an_attempt_that_ran_for_the_longest_pause_was_a_success() -> None:
    backoff = Backoff(1, 4)
    assert [backoff.next_pause(ran=ran) for ran in (0, 3.9, 3.9, 4, 0)] == [1, 2, 4, 1, 2]
