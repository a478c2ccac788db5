#!/usr/bin/env bash
# SFT → reasoning RL → reward model → general RL on five domains at once: running sums (reasoning), orders checked by rule, translation,
# requests of which some must be refused, and chat; preferences and their judge are rules too (examples/general/domains.py).
# After each stage every domain is held against the best earlier stage; at the end a judge compares the last model's answers with the
# first one's, blind. Ends with 1 where a domain lost more than 5 % or the last model does not win. Typed again, it goes on where it was.
#   examples/general.sh runs/general
set -euo pipefail
out=${1:?usage: general.sh FOLDER}
rollkeel=${ROLLKEEL:-rollkeel}
recipes=$(cd "$(dirname "$0")" && pwd)/general
export PYTHONPATH=$recipes${PYTHONPATH:+:$PYTHONPATH}  # domains.py, whose families the recipes name

stage() {  # NAME [KEY=VALUE]...: a run from the recipe NAME, then its model's answers to the common items
    local run=$out/$1
    if [ -f "$run/config.yaml" ]; then
        $rollkeel train --resume "$run"
    else
        $rollkeel train "$recipes/$1.yaml" "${@:2}" ${WORDS:-} run.dir="$run"
    fi
    [ -f "$out/$1.parquet" ] || $rollkeel eval "$recipes/evaluate.yaml" ${EVALUATE:-} model.path="$run/model" --out "$out/$1.parquet"
}

stage sft
stage reasoning model.path="$out/sft/model"
$rollkeel retained "$out/reasoning.parquet" "$out/sft.parquet"

answers=$out/rated/rollouts/step_000001.parquet
[ -f "$out/answers.parquet" ] ||
    $rollkeel rollout "$recipes/preferences.yaml" ${PREFERENCES:-} model.path="$out/reasoning/model" --out "$out/answers.parquet"
[ -f "$answers" ] || $rollkeel score "$out/answers.parquet" --out "$answers"
[ -d "$out/pairs" ] || $rollkeel pairs "$out/rated" --out "$out/pairs"
$rollkeel reward-model "$out/pairs/pairs.jsonl" "$recipes/reward_model.yaml" ${REWARD:-} model.path="$out/reasoning/model" --out "$out/reward_model"

stage general model.path="$out/reasoning/model" data.grader_options.path="$out/reward_model/model"
$rollkeel retained "$out/general.parquet" "$out/reasoning.parquet" "$out/sft.parquet"
$rollkeel win-rate "$out/sft.parquet" "$out/general.parquet" data.grader=domains:judge
