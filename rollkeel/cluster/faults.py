"""What may break, in which part, and what then happens: the table that docs/faults.md shows, each row with the test that injects it.

Imports nothing of what it is about, so that it can be read where Ray is not installed.
"""

from __future__ import annotations

from typing import NamedTuple

FAULTS = (
    "crash", "out of memory", "hang", "slow", "lost node", "partition", "wrong answer", "broken publication", "full disk", "interrupt",
)  # fmt: skip
PARTS = (
    "controller", "trainer rank", "engine", "engine server", "grader", "grader actor", "environment", "sandbox node", "storage", "Ray",
)  # fmt: skip


class Row(NamedTuple):
    """A fault of a part. Every text is one sentence, or a part of one."""

    fault: str
    part: str
    noticed: str
    """How."""
    within: str
    """Longest time until then, by the setting that says it."""
    done: str
    """What the run does."""
    kept: str
    """What is not lost."""
    test: str
    """The test that injects it."""


TABLE = (
    Row("crash", "controller", "its actors and workers see that it is gone", "at once", "everything ends; `--resume` goes on", "the newest checkpoint, with pool, queue and the bound on staleness", "tests/cluster/test_cluster_faults.py::test_a_killed_controller_loses_neither_pool_nor_queue_nor_the_bound_on_staleness"),
    Row("interrupt", "controller", "Ctrl-C, SIGTERM", "the end of the step", "a checkpoint, exit code 130", "everything", "tests/cluster/test_cluster_faults.py::test_ctrl_c_in_a_terminal_reaches_all_processes_and_ends_with_a_checkpoint"),
    Row("crash", "trainer rank", "Ray says so to the call that waits", "seconds", "the ranks begin again from what they held in memory after the last publication, and do again what they were told since; without that (`cluster.peer_copies`) all actors begin anew from the newest checkpoint; `cluster.restarts` times, then exit code 3", "in `sync` and `budgeted` every bit; engines keep what they have", "tests/cluster/test_cluster_runs.py::test_a_run_goes_on_without_a_killed_rank_as_if_it_had_not_been"),
    Row("hang", "trainer rank", "its second thread does not answer", "twice its longest silence so far and 10 s, at most 30 s; a wait of ranks for each other `cluster.deadline_s`", "as for a crash", "as for a crash", "tests/cluster/test_cluster_faults.py::test_who_is_stopped_is_told_within_a_deadline_with_his_stack"),
    Row("out of memory", "trainer rank", "as a crash; the message names signal 9 and where to look", "seconds", "as for a crash", "as for a crash", "tests/cluster/test_node_faults.py::test_memory_that_runs_out_is_named_where_an_actor_was_killed"),
    Row("slow", "trainer rank", "it answers, and deadlines follow measured times", "never", "nothing: who is slow is not dead", "everything", "tests/cluster/test_node_faults.py::test_who_is_slow_is_not_taken_for_dead"),
    Row("lost node", "trainer rank", "Ray's health checks", "16 s as Ray is set by default", "as for a crash, in another place; a neighbour's node has a copy of the state", "as for a crash", "tests/cluster/test_node_faults.py::test_a_node_with_a_rank_is_lost_and_another_node_goes_on_from_its_neighbours_copy"),
    Row("partition", "trainer rank", "Ray's health checks, or the rank's silence", "the earlier of 16 s and the deadline of a hang", "as for a lost node; what comes back is not asked again", "as for a crash", "tests/cluster/test_node_faults.py::test_a_node_with_a_rank_is_lost_and_another_node_goes_on_from_its_neighbours_copy"),
    Row("crash", "engine", "the call that waits for it fails", "seconds", "another one does again what it was told, `cluster.restarts` times; in `async`, and without a place for another one, the other engines take over; where `async` has no other one, the run goes on from its newest checkpoint", "in `sync` and `budgeted` every bit, if another one took its place; else every request", "tests/cluster/test_cluster_runs.py::test_a_killed_engine_is_replaced_and_the_run_is_the_undisturbed_one"),
    Row("hang", "engine", "it does not answer who waits for it: the loop, or a rank that sends it weights", "20 s, or twice its longest silence so far and 10 s, in decoding and in taking weights alike; in the latter it has 3 s more to answer", "it is killed; then as for a crash", "as for a crash", "tests/cluster/test_cluster_faults.py::test_who_is_stopped_is_told_within_a_deadline_with_his_stack"),
    Row("out of memory", "engine", "as a crash; the message names signal 9 and where to look", "seconds", "as for a crash", "as for a crash", "tests/cluster/test_node_faults.py::test_memory_that_runs_out_is_named_where_an_actor_was_killed"),
    Row("slow", "engine", "it answers, and deadlines follow measured times", "never", "nothing: who is slow is not dead", "everything", "tests/cluster/test_node_faults.py::test_who_is_slow_is_not_taken_for_dead"),
    Row("lost node", "engine", "Ray's health checks", "16 s as Ray is set by default", "the other engines take over; another one joins once there is a place", "every request; in `sync` every token, log-probs to 1e-6", "tests/cluster/test_node_faults.py::test_a_node_with_an_engine_is_lost_and_the_others_take_over"),
    Row("partition", "engine", "Ray's health checks, or the engine's silence", "the earlier of 16 s and the deadline of a hang", "as for a lost node; what comes back is not asked again", "as for a lost node", "tests/cluster/test_node_faults.py::test_a_node_that_is_cut_off_is_treated_as_lost_and_changes_nothing_when_it_comes_back"),
    Row("broken publication", "engine", "checksums over its own memory", "before a token", "nothing is served; exit code 3", "the newest checkpoint", "tests/cluster/test_publications.py::test_no_token_is_stamped_with_a_version_whose_stream_went_wrong"),
    Row("crash", "engine server", "its process ended or its streams broke", "seconds", "it is started again, gets proven weights, and goes on from the tokens that came", "every token", "tests/engines/test_served.py::test_a_server_killed_in_the_middle_costs_no_rollout"),
    Row("hang", "engine server", "no token of any request", "a fifth of `engine.deadline_s`", "it is killed; then as for a crash", "every token", "tests/engines/test_served.py::test_a_hanging_server_is_killed_and_its_work_goes_on"),
    Row("wrong answer", "engine server", "its log-probs of fixed prompts", "before a token", "nothing is sampled; exit code 3", "the newest checkpoint", "tests/engines/test_served.py::test_a_restart_with_wrong_weights_is_noticed"),
    Row("crash", "grader", "its process is gone", "at the next answer", "another process grades it", "every reward", "tests/rewards/test_grader_workers.py::test_a_worker_that_died_between_gradings_is_replaced"),
    Row("hang", "grader", "no verdict", "`reward.graders.deadline_s`", "its process is killed; the rollout counts as failed, never as a reward of 0", "the other rollouts", "tests/rewards/test_grader_workers.py::test_a_hanging_one_holds_nobody_up_and_is_killed"),
    Row("wrong answer", "grader", "it raises an error", "at once", "the rollout counts as failed, never as a reward of 0; above `rollout.failure_budget` exit code 3", "the newest checkpoint", "tests/test_loop.py::test_broken_graders_stop_the_run_and_never_score_zero"),
    Row("crash", "grader actor", "the call to it fails", "at its next answer", "another one does again what it did and plays its episodes again, `cluster.restarts` times; then the others alone, and without any exit code 3", "every reward", "tests/cluster/test_grader_actors.py::test_a_killed_one_is_replaced_and_nothing_is_lost"),
    Row("hang", "grader actor", "a call to it takes too long", "20 s, or twice its longest call so far and 10 s; at least `reward.graders.deadline_s`", "it is killed; then as for a crash", "every reward", "tests/cluster/test_grader_actors.py::test_a_stopped_one_is_replaced"),
    Row("wrong answer", "grader actor", "it dies of a grading, twice", "at once", "the rollout counts as failed, never as a reward of 0", "the other rollouts", "tests/cluster/test_grader_actors.py::test_a_grading_that_kills_two_actors_has_failed"),
    Row("crash", "environment", "it raises an error, or its terminal is lost", "at once", "the rollout counts as failed", "the other rollouts", "tests/rollout/test_episodes.py::test_a_broken_environment_is_no_reward_and_stops_nobody"),
    Row("crash", "sandbox node", "its connections break", "a second", "its jobs are run on other nodes, once more at most", "one result for every job", "tests/sandbox/test_front.py::test_three_thousand_jobs_while_nodes_are_killed_and_frozen"),
    Row("hang", "sandbox node", "checks miss deadlines that follow its measured times", "seconds", "it is isolated; then as for a crash", "one result for every job", "tests/sandbox/test_front.py::test_three_thousand_jobs_while_nodes_are_killed_and_frozen"),
    Row("full disk", "storage", "a write fails", "at once", "exit code 2, in one line", "what was written before, unharmed", "tests/test_cli.py::test_full_disk_leaves_nothing_half_written"),
    Row("crash", "Ray", "its head does not answer", "10 s", "exit code 3, in one line; `--resume` goes on over another cluster", "the newest checkpoint", "tests/cluster/test_node_faults.py::test_the_head_of_ray_is_gone_in_one_line_and_the_run_resumes"),
)  # fmt: skip


def markdown() -> str:
    """docs/faults.md."""
    head = ("fault", "part", "noticed by", "within", "what is done", "what is kept", "injected by")
    lines = [
        "# Faults",
        "",
        "What may break in a run, how it is noticed, and what then happens. `rollkeel/cluster/faults.py` holds this table and prints this",
        "page; every row names the test that injects the fault. What is not in it has no test, and so no promise. Nodes were raylets on one",
        "machine: nothing here has run over a network that fails.",
        "",
        "`rollkeel chaos RECIPE cluster.trainers=2 cluster.engines=2 cluster.restarts=50 run.dir=RUN --count 20 --compare` kills, stops and slows down",
        "actors of a run on this machine, kills its controller (`--faults … ,kill:controller`), and says when each was noticed and what it cost.",
        "It then reads what the run wrote: how many rollouts it trained twice or lost, and how old its oldest token was.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    return "\n".join([*lines, *(f"| {' | '.join([*row[:6], f'`{row.test}`'])} |" for row in TABLE)]) + "\n"
