"""Every number a run logs: name, unit, one sentence. `docs/metrics.md` is printed from this table, report.html shows it.

q is the probability of a token under the engine that sampled it, o under the trainer before the step's first update, p under
the trainer now; ρ = o/q. Means run over the response tokens of the step unless the sentence says otherwise.
"""

from __future__ import annotations

import re
from functools import cache

_GAP = "mismatch/[equal_version/]"
GLOSSARY: tuple[tuple[str, str, str], ...] = (
    ("step", "count", "Training step; 0 is the start model."),
    ("version", "count", "Version of the trainer's weights after the step; every optimizer update adds 1."),
    ("reward/mean", "reward", "Mean reward of the step's graded rollouts."),
    ("reward/std", "reward", "Standard deviation of the reward over the step's rollouts."),
    ("reward/shaped_mean", "reward", "Mean of reward plus penalties, which is what advantages are made of."),
    (
        "reward/undecided",
        "count",
        "Rollouts that scored 0 because their grader could not decide, or because they broke it.",
    ),
    ("reward/kl_penalty", "reward", "Mean KL penalty in the reward (train.kl_in=reward)."),
    ("reward/overlong_penalty", "reward", "Mean size of the penalty for long answers (reward.overlong)."),
    ("reward/overlong_share", "share", "Rollouts that were penalised for their length."),
    ("reward/<source>", "reward", "Mean reward of the step's rollouts of one of data.sources."),
    ("source/<source>/groups", "count", "Groups of that source that the step trains."),
    ("eval/<task>/avg@k", "accuracy", "Mean over held-out items of the mean reward of k sampled answers."),
    ("eval/<task>/avg@k_se", "accuracy", "Its standard error over items."),
    ("eval/<task>/k", "count", "Sampled answers per held-out item."),
    ("eval/<task>/greedy", "accuracy", "Mean reward of one answer per item without randomness."),
    ("eval/<task>/failed", "count", "Answers left out because engine or grader failed."),
    ("groups/count", "count", "Prompts whose answers the step was credited on."),
    ("groups/zero_variance", "count", "Prompts whose answers all had the same reward: nothing to learn from."),
    ("rollout/count", "count", "Graded rollouts of the step."),
    ("rollout/tokens", "tokens", "Tokens that the policy sampled in them."),
    ("rollout/length_mean", "tokens", "Mean length of an answer."),
    ("rollout/length_max", "tokens", "Longest answer."),
    ("rollout/length_min", "tokens", "Shortest answer."),
    ("rollout/truncated", "share", "Answers that ended at the length limit."),
    ("rollout/distinct_prompts", "count", "Different prompts among the step's rollouts."),
    (
        "rollout/duplicates",
        "count",
        "Rollouts that repeat another of their prompt beyond what its probability explains.",
    ),
    ("rollout/repeated_ids", "count", "Rollouts with an id that another one of the step has; the run stops."),
    ("rollout/trained_before", "count", "Rollouts that were trained in an earlier step; the run stops."),
    (
        "rollout/from_later",
        "count",
        "Rollouts with tokens of weights that the trainer has not made yet; the run stops.",
    ),
    ("rollout/too_old", "count", "Rollouts with tokens of older weights than the settings allow; the run stops."),
    ("rollout/old_kv", "count", "Rollouts with tokens over KV of older weights where none is kept; the run stops."),
    ("rollout/no_tokens", "count", "Answers of no token at all; the run stops."),
    ("rollout/empty", "count", "Answers without text, where most of the step's are."),
    ("rollout/uncaused", "count", "Rollouts with an advantage in groups of equal rewards; the run stops."),
    ("rollout/unstopped", "count", "Rollouts called finished that do not end with a stop token; the run stops."),
    ("rollout/same_prompt", "count", "Groups of the step, if all of them have one prompt."),
    (
        "rollout/miscredited",
        "count",
        "Rollouts with less advantage than one of their group with a lower reward; the run stops.",
    ),
    ("rollout/empty_rewarded", "count", "Answers without text that have the highest reward of the step."),
    ("rollout/right_unrewarded", "count", "Answers that are the gold answer to the letter and got no reward."),
    ("rollout/turns_mean", "count", "Turns of an episode with its environment."),
    ("rollout/dynamic_rounds", "count", "Rounds of sampling until enough prompts had differing rewards."),
    ("rollout/dynamic_discarded", "count", "Sampled prompts not trained on: equal rewards, or more than needed."),
    ("rollout/budget_tokens", "tokens", "Tokens that counted against the step's budget (run.loop=budgeted)."),
    ("rollout/overshoot", "tokens", "Tokens beyond the budget: the last decode step cannot be cut."),
    ("rollout/generated_tokens", "tokens", "Tokens decoded in the step, those of unfinished rollouts included."),
    ("rollout/decode_steps", "count", "Decode steps of the engine in the step."),
    ("rollout/finished_length_mean", "tokens", "Mean length of what finished in the step."),
    ("rollout/issued_length_mean", "tokens", "Mean length of all that was in the engine: short answers finish first."),
    ("pool/waiting", "count", "Rollouts of prompts in the pool that were not begun."),
    ("pool/parked", "count", "Unfinished rollouts kept for the next step."),
    ("pool/held", "count", "Finished rollouts that wait for the rest of their group."),
    ("pool/ready", "count", "Finished rollouts whose group is ready to train."),
    ("pool/queued_prompts", "count", "Prompts that came back to the pool and wait to be issued again."),
    ("pool/age_max", "steps", "Oldest unfinished rollout; one above the retention limit is purged."),
    ("pool/held_age_max", "steps", "Oldest finished rollout that waits for its group."),
    ("pool/started", "count", "Rollouts begun in the step."),
    ("pool/resumed", "count", "Parked rollouts that went on in the step."),
    ("pool/finished", "count", "Rollouts that finished in the step."),
    ("pool/purged", "count", "Rollouts given up in the step because they were too old."),
    ("pool/failed", "count", "Rollouts that the engine failed on in the step."),
    ("pool/reissued", "count", "Purged members issued again because their group had one finished member."),
    ("pool/returned", "count", "Prompts given back because all their members were purged."),
    ("pool/purge_rate_by_length/<from>-<to>", "share", "Purged among the rollouts of this length (% of the limit)."),
    ("async/ahead", "steps", "Steps whose rollouts were admitted beyond the one trained next (run.loop=async)."),
    ("async/wait_s", "s", "Time the trainer waited for rollouts."),
    ("failures/engine", "count", "Rollouts that the engine failed on; counts against rollout.failure_budget."),
    ("failures/grader", "count", "Rollouts that the grader failed on; the same budget."),
    ("failures/grader_nondeterministic", "count", "Rollouts of a sample that scored otherwise when graded again."),
    ("loss/total", "1", "The loss whose gradient is taken."),
    ("loss/<term>", "1", "A term of it with its coefficient: policy, kl, entropy, gap_penalty, positive_nll."),
    ("objective/kept", "share", "Tokens that every mask of the objective keeps."),
    (
        "objective/clamped_log_ratios",
        "count",
        "Log-ratios beyond ±20 that the objective cut; one of a sequence counts at each of its tokens.",
    ),
    ("advantages/nonzero", "share", "Trained rollouts whose advantage is not 0."),
    ("advantages/kept", "share", "Tokens of the batch that masks keep and whose advantage is not 0."),
    ("mask/dropped_share", "share", "Tokens that the objective's masks drop together."),
    ("checks/<name>", "0/1", "1 while the check of this name is raised; events.jsonl has its evidence and advice."),
    (
        "mask/bad_updates",
        "share",
        "Tokens with A < 0 and q − p above 0.5: pushed down far from where they were sampled.",
    ),
    ("mask/<mask>/dropped", "share", "Tokens that the mask drops."),
    ("mask/<mask>/kept", "share", "Tokens that the mask keeps."),
    ("mask/<mask>/dropped_entropy", "nats", "Mean entropy at dropped tokens."),
    ("mask/<mask>/dropped_probability", "1", "Mean p of dropped tokens."),
    ("mask/<mask>/dropped_rollout_probability", "1", "Mean q of dropped tokens (μ of the DPPO paper's Fig. 6)."),
    ("mask/<mask>/dropped_gradient_mass", "share", "Dropped share of Σ abs(A)(1 − p), a proxy of gradient size."),
    ("mask/<mask>/dropped_<threshold>", "share", "Tokens dropped by one threshold of a mask that has several."),
    ("mask/<mask>/floored", "count", "Tokens whose 1 − p was 0 after rounding and was raised to the smallest number."),
    ("mask/<mask>/<threshold>", "1", "Current value of the mask's threshold."),
    (
        "clip/high",
        "share",
        "Tokens cut above, by a surrogate (PPO: A > 0, ratio above 1 + clip_high) or by a mask that is its clip.",
    ),
    ("clip/low", "share", "Tokens cut below (PPO: A < 0, ratio below 1 − clip_low), likewise."),
    ("clip/cut", "share", "Tokens that the surrogate cuts, above or below."),
    ("clip/cut_entropy", "nats", "Mean entropy at these."),
    ("clip/cut_probability", "1", "Mean p of these."),
    ("clip/cut_rollout_probability", "1", "Mean q of these."),
    ("clip/cut_gradient_mass", "share", "Their share of Σ abs(A)(1 − p)."),
    ("weight/mean", "1", "Mean correction weight of kept tokens."),
    ("weight/max", "1", "Largest correction weight of a kept token."),
    (
        "controller/[<mask>/]bound",
        "1",
        "Current bound of a threshold that follows a drop rate; without a mask's name if it is the only one.",
    ),
    ("controller/[<mask>/]acceptance", "share", "Running estimate of the share such a threshold accepts."),
    ("controller/[<mask>/]target", "share", "Share it aims at."),
    (
        "bias/delta_j",
        "1",
        "Σ c·A·(f − u), u = p/q, f all that multiplies A·∇log p: the bias against importance sampling, sum of the parts below.",
    ),
    (
        "bias/delta_j_ratio",
        "1",
        "Σ c·A·(b − u), b the surrogate's ratio before cuts: Σ c·r·A·(1 − ρ) for r (stability study eq. 10), 0 for u.",
    ),
    ("bias/delta_j_weight", "1", "Σ c·A·b·(w − 1), w the correction weight."),
    (
        "bias/delta_j_clip",
        "1",
        "Σ c·A·w·(g − b), g what cuts and caps of the surrogate leave of b (eqs. 11–14; of 12 the tokens that PPO really cuts).",
    ),
    ("bias/delta_j_mask", "1", "Σ c·A·w·g·(k − 1), k the masks (eq. 35 with φ = k)."),
    ("bias/delta_j_perturb", "1", "Σ c·A·k·w·g·(x − 1), x perturbations and the kept denominator (eq. 35 with φ = x)."),
    (
        "bias/delta_clip",
        "1",
        "−Σ c·A·b over ratios b outside PPO's band, whatever the sign of A: eqs. 12 and 14 as printed; b is gspo's under gspo.",
    ),
    (
        "bias/delta_inj",
        "1",
        "Σ c·S·(x − 1) by the value of the surrogate S, where a cut token still counts (eq. 20; eq. 16's Y under gspo).",
    ),
    (
        "bias/j",
        "1",
        "Σ A·(φ − 1), φ = δ where o < 0.1: the applied distortion of rare tokens, or a nominal one of δ = 2 (eq. 23).",
    ),
    ("mismatch/source", "0 or 1", "1: o was recomputed before the step; 0: p of the first pass stands for it."),
    ("mismatch/non_finite", "count", "Tokens left out because a log-prob is NaN or infinite."),
    (
        "mismatch/beyond_dtypes_max",
        "1",
        "Gap of tokens that the trainer's own weights sampled over what both dtypes explain at most; above 1 the run stops.",
    ),
    ("mismatch/clamped_log_ratios", "count", "Tokens whose log ρ lies beyond ±20."),
    ("mismatch/expected_ratio", "1", "Mean kept mass: what ratio_mean should be near under truncated sampling."),
    ("mismatch/equal_version/share", "share", "Tokens sampled by the version of the weights that o is of."),
    (
        f"{_GAP}tokens",
        "count",
        "Tokens behind the other numbers of this prefix; equal_version: same weights on both sides.",
    ),
    (f"{_GAP}ratio_mean", "1", "Mean ρ; 1 with honest log-probs and untruncated sampling, whatever the weights."),
    (f"{_GAP}ratio_std", "1", "Standard deviation of ρ: the mismatch of the stability study; 0 means no mismatch."),
    (f"{_GAP}ratio_max", "1", "Largest ρ."),
    (f"{_GAP}prob_abs_diff", "1", "Mean abs(o − q)."),
    (f"{_GAP}prob_abs_diff_max", "1", "Largest abs(o − q)."),
    (f"{_GAP}logprob_abs_diff", "nats", "Mean abs(log o − log q)."),
    (f"{_GAP}pearson", "1", "Correlation of (o, q); 1 means that both engines agree; none if one hardly varies."),
    (f"{_GAP}kl", "nats", "Mean of log q − log o: KL(q‖o), noisy."),
    (f"{_GAP}kl_k3", "nats", "Mean of ρ − 1 − log ρ: KL(q‖o), never negative."),
    (f"{_GAP}inverse_ratio_mean", "1", "Mean 1/ρ."),
    (f"{_GAP}second_moment", "1", "Mean ρ²: 1 + χ² of a token's choice."),
    (
        f"{_GAP}js",
        "nats",
        "Jensen-Shannon divergence of o and q, without bias: mean of ½(ρ log ρ − (1 + ρ) log((1 + ρ)/2)).",
    ),
    ("mismatch/perplexity", "1", "Mean over sequences of exp(−mean log o)."),
    ("mismatch/rollout_perplexity", "1", "Mean over sequences of exp(−mean log q)."),
    ("mismatch/log_perplexity_gap", "nats", "Mean over sequences of mean(log q) − mean(log o)."),
    ("mismatch/log_perplexity_gap_abs", "nats", "Mean size of that gap."),
    ("mismatch/log_perplexity_gap_abs_max", "nats", "Its largest size."),
    ("mismatch/perplexity_ratio", "1", "Mean over sequences of the exp of that gap."),
    ("mismatch/chi2_sequence", "1", "χ² of whole sequences: mean of (Π ρ)² − 1, log Π ρ held at ±20."),
    (f"{_GAP}ess", "share", "Effective sample size (Σ w)²/(n Σ w²) of the correction weights w (of ρ without any)."),
    ("mismatch/by_probability/<o or q>_<low>/share", "share", "Tokens with o (or q) in [low, low + 0.1)."),
    ("mismatch/by_probability/<o or q>_<low>/mean", "1", "Mean ρ of these."),
    ("mismatch/by_probability/<o or q>_<low>/std", "1", "Standard deviation of ρ of these."),
    ("staleness/mean", "versions", "Version that o is of minus version that sampled the token."),
    ("staleness/max", "versions", "The oldest token's."),
    ("staleness/span", "versions", "Newest minus oldest version inside one rollout, largest."),
    ("staleness/span_mean", "versions", "The same, mean over rollouts."),
    ("routing/flip_rate", "share", "(token, layer) pairs that engine and trainer send to different experts."),
    ("routing/flipped_tokens", "share", "Tokens with such a layer."),
    ("policy/entropy", "nats", "Mean entropy of the trainer's distribution."),
    ("policy/prob_mean", "1", "Mean p of the sampled tokens."),
    (
        "policy/kl_base",
        "nats",
        "KL from the policy to the start model: mean of ref/p − 1 − log(ref/p), k3; see `train.kl_every`.",
    ),
    ("optimizer/grad_norm", "1", "Norm of the gradient before clipping, mean over the step's updates."),
    (
        "optimizer/changed_share",
        "share",
        "Weights that an update changed, of a sample of about 16,384; of a low-precision weight, its float32 master.",
    ),
    (
        "optimizer/loss_scale",
        "1",
        "What the loss was multiplied by for float16 gradients, mean over the step's updates.",
    ),
    ("optimizer/skipped", "share", "Updates of the step that were left out because float16 gradients overflowed."),
    ("optimizer/lr", "1", "Learning rate of the last update."),
    ("optimizer/updates", "count", "Optimizer updates of the step; 0 if there was nothing to learn from."),
    ("sync/bytes", "bytes", "Sent to the engines for the step's weights (sync.kind=delta or auto)."),
    (
        "sync/changed",
        "share",
        "Elements that the step changed in the weights as they are served (sync.kind=delta or auto).",
    ),
    ("sync/deltas", "count", "Engines that got changed elements alone; 0 if all weights were sent."),
    ("sync/deltas_refused", "count", "Engines that refused a delta and got all weights in its place."),
    ("sync/probe_gap_<median, mean or max>", "nats", "abs log-prob gap of a served engine on probe sequences."),
    ("sync/probe_retries", "count", "1 if the weights had to be published again before the probes agreed."),
    ("time/grader_<name>_<p50, p99 or max>_seconds", "s", "Time a grader took for one rollout."),
    ("time/reward_overlapped_seconds", "s", "Grader time that was over before anybody waited for it."),
    (
        "time/<stage>_s",
        "s",
        "Time of a stage: rollout, reward, logprob, update, sync, eval, record …; step: all of it.",
    ),
    ("throughput/<stage>_tokens_s", "tokens/s", "Tokens of the stage by its time; step: trained tokens by the step's."),
    (
        "memory/<phase>/held_mb",
        "MB",
        "What trainer and engine of the first rank's device hold at the end of the phase (memory.offload).",
    ),
    ("memory/<phase>/peak_mb", "MB", "Most of it in the phase."),
    ("memory/<phase>/moved_mb", "MB", "What left the device and came back for the phase."),
    ("memory/<phase>/moved_s", "s", "How long these moves took."),
    ("memory/<phase>/waited_s", "s", "How long the run waited for them."),
    ("memory/rss_mb", "MB", "Peak resident memory of the trainer's process so far."),
    ("sft/loss", "nats", "Cross-entropy per target token in the warm start."),
    ("sft/entropy", "nats", "Entropy of the model's distribution at target tokens."),
    ("sft/target_probability", "1", "Mean probability of the target tokens."),
    ("sft/tokens", "tokens", "Target tokens seen."),
    ("sft/steps", "count", "Steps of the warm start."),
)
"""`(name, unit, sentence)`; `<word>` stands for any part of a name, `[…]` may be missing. The first that fits counts."""


def meaning(key: str) -> str:
    """`sentence (unit)` of a metric; empty for one that the glossary does not have."""
    return next((f"{said} ({unit})" for pattern, unit, said in _patterns() if pattern.fullmatch(key)), "")


def page() -> str:
    """`docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every number in `metrics.jsonl`, printed from `rollkeel/record/glossary.py`. q is the probability of a token",
        "under the engine that sampled it, o under the trainer before the step's first update, p under the trainer now;",
        "ρ = o/q. Means run over the response tokens of the step unless the sentence says otherwise. `<word>` stands for",
        "any part of a name, `[…]` may be missing.",
        "",
        "| metric | unit | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | {unit} | {said} |" for name, unit, said in GLOSSARY),
    ]
    return "\n".join(lines) + "\n"


@cache
def _patterns() -> list[tuple[re.Pattern[str], str, str]]:
    return [(_pattern(name), unit, said) for name, unit, said in GLOSSARY]


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<[^>]+>|\[|\])", name)
    regex = {"[": "(?:", "]": ")?"}
    return re.compile("".join(regex.get(p) or ("[^/]+" if p.startswith("<") else re.escape(p)) for p in parts))


if __name__ == "__main__":
    print(page(), end="")
