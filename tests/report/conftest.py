"""Here charts are what is tested, but for what stands beside them."""

import pytest

BESIDE = {
    "test_a_strange_config_does_not_stop_the_report",
    "test_damaged_files_are_named_and_the_rest_is_shown",
    "test_duration_leaves_out_the_time_between_sessions",
    "test_pieces_come_from_the_tokenizer_of_the_run_when_the_file_has_none",
    "test_text_of_the_model_stays_text",
    "test_tokens_carry_both_probabilities_and_dropped_ones_are_struck",
    "test_torn_token_columns_cost_no_report",
}


@pytest.fixture(autouse=True)
def charts_are_drawn(request: pytest.FixtureRequest) -> None:
    if request.function.__name__ not in BESIDE:
        request.getfixturevalue("drawn")
