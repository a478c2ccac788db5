"""A gold answer must earn 1 and a wrong one 0, for every item."""

from rollkeel import tasks
from rollkeel.scaffold.task import Example


def test_an_item_by_hand() -> None:
    item = tasks.TaskItem(text="abc>", answer="cba")
    assert Example().verify(item, " cba\n")[0] == 1.0
    assert Example().verify(item, "cab")[0] == 0.0


def test_two_hundred_items() -> None:
    for options in ({}, {"letters": 8}):
        assert tasks.check(Example(options), 200).passed
