#!/usr/bin/env bash
# SFT → reasoning RL → reward model → general RL (Ring-1T report, section 2) on the tiny model and Sudokus of 4×4, each model
# evaluated on the same items. Typed again after an interruption, it goes on where it was.
#   examples/ring.sh runs/ring
# WORDS and EVALUATE are further settings of runs and evaluations: with cluster.trainers=2 cluster.engines=1 in both, all but the reward
# model is trained and sampled by the actors of a cluster.
# The reward model is trained on pairs of the second run's own answers, so general RL only holds what that has learnt.
set -euo pipefail
out=${1:?usage: ring.sh FOLDER}
rollkeel=${ROLLKEEL:-rollkeel}

stage() {  # NAME [KEY=VALUE]...: a run from the recipe ring/NAME, then its model's accuracy
    local run=$out/$1
    if [ -f "$run/config.yaml" ]; then
        $rollkeel train --resume "$run"
    else
        $rollkeel train "ring/$1" "${@:2}" ${WORDS:-} run.dir="$run"
    fi
    [ -f "$out/$1.parquet" ] || $rollkeel eval ring/evaluate ${EVALUATE:-} model.path="$run/model" --out "$out/$1.parquet"
}

stage sft
stage reasoning model.path="$out/sft/model"
[ -d "$out/pairs" ] || $rollkeel pairs "$out/reasoning" --out "$out/pairs"
$rollkeel reward-model "$out/pairs/pairs.jsonl" ring/reward_model ${REWARD:-} model.path="$out/reasoning/model" --out "$out/reward_model"
stage general model.path="$out/reasoning/model" data.path="$out/pairs/prompts.jsonl" \
    data.grader_options.path="$out/reward_model/model"
