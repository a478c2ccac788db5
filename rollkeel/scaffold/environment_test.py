"""The right turns must earn 1 and a wrong one must end the episode with 0."""

from rollkeel import tasks
from rollkeel.scaffold.environment import Example


def test_an_episode_by_hand() -> None:
    game = Example()
    assert game.reset(tasks.TaskItem(text="42:", answer="24")) == "42:"
    assert (game.step("2").done, game.step("4").reward) == (False, 1.0)
    game.reset(tasks.TaskItem(text="42:", answer="24"))
    wrong = game.step("4")
    assert (wrong.done, wrong.reward) == (True, 0.0)


def test_two_hundred_episodes() -> None:
    assert tasks.check(Example(), 200).passed
