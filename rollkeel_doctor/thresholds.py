"""Every number a verdict hangs on, with where it comes from.

"Runs" are those of the recipes and of the development splits of `benchmarks/doctor`: tiny mixtures of experts and tiny
dense models. A gate asks for an effect size and for a z-score, so that neither noise nor a mere 10⁷ tokens is a fault.
"""

from __future__ import annotations

ABOVE_ZERO = 0.01  # A log-prob may be above 0 by the rounding of bfloat16 near 1 (0.004), not by more.
CLAMP = 20.0  # Log-probs are cut here, as log-ratios are in the objectives.
ENTROPY_BELOW = -0.01  # An entropy may be below 0 by rounding, not by more.
ENTROPY_SPOILT = 0.01  # Share of entropies below that from which none of them is believed.
MAX_BINS = 512  # Steps told apart; longer traces are put into so many runs of steps.
MIN_TOKENS = 200  # Fewer tokens with both log-probs tell nothing about the gap.
MIN_INFORMED = 40
"""Tokens of middling probability from which the noise in logits is read: its error is then about 15 %."""
STEP_OVER = 1.2
"""Times what the dtypes explain that three single steps must reach: honest steps of whole runs have 0.03 to 0.92 times that, those whose
weights are one or two steps old up to 1.55 under fp8."""
SURE = 1e-4  # 1 − q from which a log-prob in float32 tells its logit to 1 %.
OFTEN = 20  # Times a token id must be seen for its mean to count.
MIN_SEQUENCES = 16  # Fewer rewards tell nothing about a trend.
POSITIONS = 10  # Tokens shown per cause.

# -- E_q[ρ] = 1 --------------------------------------------------------------------------------------------------------
EXCESS = 0.005
"""Honest runs stayed within 0.003 of 1 (fp32, bf16, fp8, stale, flipped); bugs left it by 0.016 and more."""
EXCESS_Z = 4.5
"""Chance of one false alarm in 10⁵ honest traces, if means were normal; the tails of ρ make it a little more."""

# -- alignment and re-tokenisation -------------------------------------------------------------------------------------
SHIFT_LAGS = (-4, -3, -2, -1, 1, 2, 3, 4)
SHIFT_APART = 0.15
"""Nats: a sequence is looked at if its |log ρ| averages more. Honest fp8: 0.02; 16 steps of staleness: about 0.2."""
SHIFT_FITS = 0.35  # It is shifted if another lag brings that below this share. Chosen, not fitted.
DISPLACED_FITS = 0.6
"""The same where tokens may have moved by one to three places, against no move and against moves the other way."""
DISPLACED_SHARE = 0.05
"""Share of sequences that must be displaced: old KV does it to 2 % by chance, encoding anew to most that can be split."""
DISPLACED_CHANCE = 10
"""Sequences that a gap of the size of 16 steps of staleness displaces by chance; more must show it."""
BREAK = 2.0  # Nats by which the trainer must find a token less likely than the sampler for a sequence to break there.
BREAK_BEFORE = 0.15  # Mean |log ρ| before that token, at most: fp8 has 0.02.
BREAK_AFTER = 0.5  # Share of the tokens from there on that are `OUTLIER` apart. Chosen, not fitted.
BREAK_NOISE = 0.2
"""Noise in logits before it, at most: re-tokenised runs have what their dtype has (bf16 0.03), stale ones 0.5 and more."""
BREAK_SHARE = 0.03  # Share of sequences that must break.
SHIFT_LENGTH = 5  # Tokens compared in the shifted part, at least.
SHIFT_SHARE = 0.01  # Share of sequences that must be shifted, and at least `SHIFT_COUNT` of them.
SHIFT_COUNT = 3
SHIFT_ALL = 0.2
"""Share of sequences below which a shift beside re-tokenised ids is theirs. Chosen: a wrong slice shifts all or one kind."""
SHIFT_CONTRAST = 4
"""Times as many sequences must fit that lag as any other: a policy 16 steps old has 2 % that fit some lag by chance."""
FRESH_EXPECTED = 5
"""Sequences of the trainer's own version that should be among those found, from which it counts that they are not: …"""
FRESH_LEAST = 0.25  # … fewer than this share of that. Chance leaves 0 or 1 of 5 in one trace of 25.
PARTLY = 1.5
"""Times as many sequences displaced from a later token on as shifted whole: the ids changed, not the offset."""
SHIFT_LEFT = 0.1
"""Share of |log ρ| that a whole shift may leave, beside twice what the other sequences have: neighbours' kept masses differ by so much
(0.03); where ids were encoded anew 0.2 is left, of the tokens before the first one that changed."""
LATER = 0.5
"""… or what a whole shift leaves over falls below this share where each sequence may begin to be displaced at a token of its own."""
SHIFT_EXACT = 0.03  # Share of |log ρ| below which a whole shift leaves nothing to explain: bf16 has 0.02.
OUTLIER = 1.0
"""Nats of |log ρ| from which a token is one that the trainer was not shown as it was sampled; fp8 has 0.1 % of them."""
OUTLIER_REST = 0.2  # … while the median of |log ρ| over all tokens stays below this share of the outliers' median.
RATIO_MOST = 4.0  # ρ of no token counts for more: re-tokenised runs have a mean of 1.2 to 1.3, others at most 1.002.
ABSURD_K3 = 10.0
"""k3 over odd tokens alone from which no engine ever sampled them: rounding, routing and other weights have 0.5 to 4,
re-tokenised runs 34 and more."""
ABSURD_SHARE = 0.003  # Share of odd tokens that this needs.
SPOILT = 10.0
"""Noise in logits behind odd tokens over that before them in the same sequences, from which they spoil what follows, and more than
`HARMFUL_NOISE`. Chosen: a flip is one token's, an id that was not sampled is context of all behind it."""
OUTLIER_SHARE = 0.25  # More tokens than this are not odd tokens but another policy.

# -- mask --------------------------------------------------------------------------------------------------------------
FOREIGN_SHARE = 0.002  # Share of tokens in the mask that were never sampled.
FOREIGN_COUNT = 5
FOREIGN_APART = 1.0  # Nats between a filled-in log q and log o from which a token counts as never sampled.
FOREIGN_SURPRISAL = 5.0
"""Nats: tokens this unlikely to both sides that stand side by side were not drawn from anything near it."""

FOREIGN_RUNS = 0.01  # Share of such tokens: a policy that a learning rate of 0.01 blew up has 0.004.

# -- surprisal = entropy -----------------------------------------------------------------------------------------------
NEAR_K3 = 0.03
"""k3 of all tokens up to which E_q[ρ] and the surprisal are taken over the old ones too: up to three steps of staleness."""
SURPRISAL = 0.04
"""Share of the mean entropy by which mean(−log o) may leave it: honest runs stayed within 0.03; simulated top-p 0.98 leaves it."""
SURPRISAL_Z = 5.0

CHOSEN_EXPECTED = 8
"""Groups of equal rewards that chance, or the groups that were not trained on, would have among those that were, …"""
CHOSEN_LEFT = 0.25  # … of which so few are left that they were picked out.
CUT_ENTROPY = 0.3
"""Nats, from which a cut that was stated must leave less than the whole: two tokens of which the rarer has 9 %."""
CUT_SEEN = 0.01  # Share of such tokens with a kept mass below 1, up to which none is recorded.

# -- temperature -------------------------------------------------------------------------------------------------------
SLOPE = 0.05  # |log| of the slope of logit q on logit o; fp8 has 0.012.

SLOPE_LEAST, SLOPE_MOST = 0.6, 1.2
"""Its share of |log| of the stated temperature where one side forgot that: to first order it comes out at 0.68 (T 0.6) to 0.99."""

# -- what a dtype explains ---------------------------------------------------------------------------------------------
NOISE = {
    "fp32": 0.003,
    "bf16": 0.055,
    "fp16": 0.03,
    "int8": 0.04,
    "fp8_weights": 0.11,
    "fp8": 0.20,
    "int4": 0.45,
}
"""Largest honest noise in logits. Measured over whole runs: fp32 0.0000, int8 0.014, bf16 0.034, fp8_weights 0.060,
fp8 0.094, int4 0.247; the limit is 1.6 to 2 times that."""
K3 = {
    "fp32": 1e-4,
    "bf16": 3e-3,
    "fp16": 1e-3,
    "int8": 2e-3,
    "fp8_weights": 6e-3,
    "fp8": 1.5e-2,
    "int4": 6e-2,
}
"""Largest honest mean(ρ − 1 − log ρ). Measured: bf16 3.7e-4 to 6.1e-4, fp8_weights 1.1e-3, fp8 3.3e-3, int4 1.8e-2."""
UNSTATED = "bf16"  # Taken for a dtype the trace does not state: the field's default.
HARMFUL_NOISE = 0.2
"""Above it a gap harms whatever dtype explains it: int4 is at 0.21 to 0.33 and kills negative-only training
(its reward stays at 0), fp8 at 0.09 changes nothing in 200 steps."""
HARMFUL_K3 = 0.01

# -- weights and versions ----------------------------------------------------------------------------------------------
WRONG_NOISE = 0.8
"""Noise in logits that no quantisation in use makes: int4 has 0.25, at a temperature of 0.8 up to 0.57."""
WRONG_K3 = 0.06  # The same for k3: int4 has 0.018, swapped experts 0.29.
FLIPPED = 0.03  # Share of tokens with other experts from which routers are looked at; honest bf16 has 0.01 to 0.05.
FLIPPED_EARLY = 0.4
"""Share of the later steps' flips that the first quarter has where routers are at fault; old weights have none at first."""
FLIPPED_SHARE = 0.6
"""Share of k3 on tokens with other experts: 0.46 to 0.88 where routers are at fault, 0.17 to 0.48 where bits are missing."""
FLIPS_PER_NOISE = 2.2
"""Share of flipped tokens over the noise in logits of the others: 2.4 to 11 where routers round, 0.3 to 2.0 where flips follow
from int4, fp8 or bf16."""
FLIPPED_TAILS = 1.97
"""Standard deviation over noise of the gap in logits: 2.02 to 4.4 where routers are at fault, 1.4 to 2.2 for rounding. A vote, no proof."""
FLIPPED_BY_TOKEN = 0.025
"""Share of that variance between token ids: at most 0.01 where routers are at fault, 0.016 to 0.13 for rounding."""
FLIPPED_NO_TOKEN = 0.015  # The same below which no tails are needed: with more experts per token each flip is smaller.
RANDOM = 0.2
"""Root of the share of the gap between repeats of the same question: 0.33 to 0.9 where routers jitter, 0.00 for every dtype."""
FLIPS_OF_NOISE = 0.15
"""Share of flipped tokens over the noise in logits: 0.06 where the fault is behind the last router, rounding has 0.3 and more."""
BEHIND = 3.0
"""Square of the spread behind a change of version over that of other tokens of the same staleness: old KV has 5 and more in bf16,
honest budgeted runs up to 2."""
JUMP = 0.5  # A gap whose first step has this share of its later level came at once; staleness grows over some steps.
LAG_FAR = 0.03
"""Share of tokens with ρ outside [0.5, 2] from which staleness harms: asynchronous, budgeted and slightly stale runs have up to
0.014, 10 steps 0.04 to 0.09, 16 have 0.095 and GRPO forgets what it knew."""
LAG_K3 = 0.12

# -- training ----------------------------------------------------------------------------------------------------------
APART = 1.75
"""Spread of steps whose update did not arrive over that of the others: 1.9 under fp8 and 4 or more in bf16 and fp32; honest noise
that is about as large as the limit has 1.2 to 1.6 in the steps above it."""
ENTROPY_LOW = 0.05  # Nats per token: below it almost nothing is explored.
ENTROPY_FALL = 0.35  # … and below this share of its highest.
ENTROPY_HALF = 0.65
"""… or below this share of it while the reward falls by `ENTROPY_LOSS` of its early level: where entropy was punished it
went from 0.43 to 0.22 and the reward from 0.35 to 0.09."""
ENTROPY_LOSS = 0.4
ENTROPY_GAIN = 0.24
"""Share of what was left to gain, from the first tenth of the steps on, that the reward must gain for a fall of entropy to be
success: where entropy was punished it gained −0.2 to 0.2; Sudokus in turns, whose entropy falls as far, gain 0.28 to 0.42 in
60 steps and the default recipe 0.8 in 150."""
REWARD_BEST = 0.75  # Share of the reward's range from which a low entropy is success and not collapse.
ZERO_VARIANCE = 0.6
"""Share of groups without differing rewards from which little is learnt: 0.67 to 0.97 where entropy was punished, up to 0.58 in healthy runs."""
TREND_Z = 3.0
REWARD_FALL = 0.5  # Share of its best level that the reward must lose to be said to fall.
DEAD_STEPS = 6
"""Of so many steps, at least, the later half must bring only the lowest reward for a policy to be called dead, …"""
DEAD_CHANCE = 1e-3  # … and chance would put all better ones into the steps that have them less often than this.
CLIPPED = 0.05
"""Share of tokens whose ratio left PPO's band within a step: healthy runs have up to 0.025, learning rates ten times too high
0.08 to 0.29. The threshold is their geometric mean."""
GRAD_SPIKE = 5.0  # Largest gradient norm over its median.
ENTROPY_STEP = 0.3
"""Largest change of mean entropy from one step to the next, as share of the larger: healthy runs have up to 0.2, …"""
ENTROPY_JUMP = 0.2
"""… and in nats, at least: a learning rate ten times too high has 0.23 to 2.2, healthy runs up to 0.10, punished entropy 0.12."""
CUT_SHARE = 0.1  # Share of responses that end at the length limit.
DRIVEN_STEPS = 3  # Steps with a gradient that no reward explains from which something else is said to drive the policy.
CUT_GAP = 0.2  # Share of the reward's range by which they score below the others, …
CUT_SCORE = 0.5  # … or the share of the others' score that they do not reach.
CUT_SELDOM = 0.3  # Below this share of the range a cut response is seldom right, …
CUT_LOSS = 0.1  # … and then it is enough that it scores this share less than the others', …
CUT_Z = 1.0
"""… with this z-score, for the score of a prompt varies more than what a cut costs: 1.0 to 3.6 where half or a fifth are cut."""
GRADER_SHARE = 0.01  # Share of rewards that a failed grader stands behind, and at least `GRADER_COUNT` of them.
GRADER_COUNT = 3
SILENT_SHARE = 0.5
"""Share of the lowest rewards without a detail up to which that is the exception; above it the grader says nothing of wrong answers."""
SIGNAL_GROUPS = 4  # Groups of several rollouts, at least, of which it is said that their rewards differ or do not.
SIGNAL_SHARE = 0.01
"""Share of groups with differing rewards up to which there never was a signal. Chosen: a hundred groups teach one thing."""
SOLVED = 0.9  # Share of the reward's range from which groups without differences are solved.
LOST_SHARE = 0.4
"""Share of the best level (over the least reward) that must be gone for the reward to be lost: whole runs of the recipes that learnt
fall by up to 0.2 of theirs from an eighth of the steps to another. Chosen between that and the whole."""
LOST_Z = 5.0
KEPT_LEAST = 0.01
"""Share of tokens kept below which masks leave nothing to learn from; the strictest objective keeps a third."""
UNMOVED = 1e-6  # Nats within which a log-prob is the same in float32, …
UNMOVED_VERSIONS = 4  # … so many versions apart: a learning rate of 1e-6 moves one by 1e-4.
ADVANTAGE_GROUPS = 16  # Groups with differing rewards and advantages from which their correlation is judged.
ADVANTAGE_AGREES = 0.3
"""Mean correlation inside groups below which advantages are not of these rewards: 1 for every estimator from rewards alone, 0.8 with a
length penalty that weighs as much, less with a critic; permuted ones have −0.1 to 0."""
REPEAT_CHANCE = 1e-3
"""Sequences less likely than this are hardly ever drawn twice in a step, whatever temperature was forgotten: …"""
GROUPS_WHOLE = (
    0.9  # Share of rollouts in groups of the largest size from which answers were not picked by when they end.
)
REPEATED = 0.2  # … and have fewer copies than this.
SAME_PROMPT_GROUPS = 4
"""Groups of a step that may not all have the same prompt; steps with as many groups a prompt, in a run with as many times their
prompts, have too few."""
CUT_ALL = 0.9
"""Share of responses at the limit, and of those that are shorter than the answer, from which the limit is below the answers."""
CUT_LEAST = 0.75  # Share of the best reward that responses cut so do not reach on average.
CUT_FINISHED = 0.02
"""Share of finished responses without a stop token that are more than an oddity: an honest engine has 0."""
LINE_FITS = 0.3
"""Share of the variance of log ρ that the line of a temperature explains; simulated: 0.93 and more at T 0.7 with a gap of
fp8 beside it, 0.66 at T 0.9; numerics 0.03."""
LINE_ALL = 0.95
"""Share from which a few sequences that look moved by chance do not count against it: T 1.4 has 0.997 beside 7 % of these."""
LINE_FITS_HONEST = 0.8
"""The same where E_q[ρ] is 1, so that sharper weights must be told from another temperature: 16 steps of staleness 0.54."""
WRONG_BIAS = 0.7
"""|median| over noise of the gap in logits: quantisation has 0.14 (fp8) to 0.52 (int4, tempered), one tensor that stood still 1.0."""
WRONG_BY_TOKEN = 0.16
"""Share of the gap's variance between token ids: int4 has 0.03 to 0.10, fp8 weights up to 0.13, rolled experts or heads 0.19 to 0.54."""
STUCK_BIAS = 2.0
"""|median| over noise of the gap in logits where a head stands still (4 by the end); whole stale weights have 0.5 to 1.5."""
DRIFT_Z = 2.0
"""z-score from which the sampler is said to go on learning: stale ones had −3.8 to 1.4, those with stuck layers 2.8 and more."""
UNEXPLAINED = 0.02
"""E_q[ρ] this far off without a pattern is reported as it is; the z-score asked for is twice the usual one."""
RECOMPUTED = 0.1
"""Share of the gap that may be left where other weights or another dtype are said to be what the engine computed with; a wrong
guess adds its own gap to that of the fault, a right one leaves 1e-5 and in a rounded dtype what prefill and decoding differ by."""
RECOMPUTED_NEARER = 0.8
"""The same where weights of an earlier step are nearer than any others: the engine may have stood still between checkpoints."""
RECOMPUTED_EXACT = 1e-3  # Share below which nothing else is tried.
RECOMPUTED_LEAST = 1e-3  # Mean distance below which the record is what the stated weights and dtype give.
RECOMPUTED_FP32 = 1.5e-4  # The same of stated float32, which has no rounding to differ by: at most 7e-5, mostly 3e-7.
RECOMPUTED_ROUNDED = 5e-3  # The same in a rounded dtype: bf16 by prefill instead of decoding 3e-3 at most.
