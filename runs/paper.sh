#!/usr/bin/env bash
# The paper's experiment: WikiText-2 at word level, 1 layer, 1 head, post-LN, width 128, with and without LocAteR.
#
#   runs/paper.sh DATA [OUT]      DATA: the folder with train.txt and valid.txt; OUT: where the runs go (runs/paper)
#
# Stop it at any time and start it again: finished runs are skipped, the others continue to the bit. Other FLAGS or DATA
# are other runs: give them an OUT of their own.
#   SEEDS="0 1 2" JOBS=2 ARMS="none middle-3.5" runs/paper.sh DATA
# A longer LENGTH continues what is there. One epoch is 1,020 steps of 16 × 128 words, some 15 minutes on one core.
#   LENGTH="--set epochs=2" SEEDS=0 ARMS="none free-2.5e-3" runs/paper.sh DATA
# On a GPU, the full length:
#   LENGTH="--set epochs=40" JOBS=1 FLAGS="--set device=cuda --set precision=bf16 --set batch=64 --set learning_rate=2e-3" \
#     runs/paper.sh DATA runs/gpu
set -euo pipefail
DATA=${1:?"usage: runs/paper.sh DATA [OUT]"}
OUT=${2:-runs/paper}
LENGTH=${LENGTH:-"--set epochs=1"}
SEEDS=${SEEDS:-"0 1 2"}
JOBS=${JOBS:-2}
FLAGS=${FLAGS:-}
EVERY=${EVERY:-255}
# As many threads as processes share the cores: two threads on busy cores are several times slower than one.
THREADS=${THREADS:-1}
LOCATER=${LOCATER:-locater}

# A name and its options of `locater train`. `mean` is tr W in units of λ; the theory's border between late and middle is 2.
TABLE="
none         --strength 0
free-2.5e-3  --strength 2.5e-3
initial      --strength 2.5e-3 --set mean=initial
middle-3.5   --strength 2.5e-3 --set mean=3.5
free-2.5e-4  --strength 2.5e-4
free-1e-3    --strength 1e-3
free-1e-2    --strength 1e-2
late-1       --strength 2.5e-3 --set mean=1
border-2     --strength 2.5e-3 --set mean=2
middle-7     --strength 2.5e-3 --set mean=7
early-1      --strength 2.5e-3 --set mean=-1
weak-3.5     --strength 2.5e-4 --set mean=3.5
strong-3.5   --strength 1e-2 --set mean=3.5
let-go-3.5   --strength 2.5e-3 --set mean=3.5 --set mean_until=500
mean-3.5     --set mean=3.5
decay-8      --set qk_decay=8
"
ARMS=${ARMS:-$(awk 'NF { print $1 }' <<<"$TABLE")}

run() { # seed, name, flags
  local folder="$OUT/$2-seed$1" how
  local log="$folder.log" begun="$folder.begun" done="$folder/done" start="$DATA | ${*:3} | every $EVERY | $FLAGS"
  [ "$(cat "$done" 2>/dev/null)" = "$LENGTH" ] && return 0
  if [ -f "$folder/config.json" ]; then
    [ "$(cat "$begun" 2>/dev/null)" = "$start" ] ||
      { echo "$folder was begun with other settings ($begun): give these an OUT of their own" >&2; return 255; }
    how=(--resume "$folder")
  else
    echo "$start" >"$begun"
    # shellcheck disable=SC2206
    how=(--preset paper --data "$DATA" --seed "$1" "${@:3}" --set "validate_every=$EVERY" --set "save_every=$EVERY" $FLAGS
      --out "$folder")
  fi
  # A run that was stopped reports too, but not with exit code 0: only a finished one gets its stamp.
  # shellcheck disable=SC2086
  OMP_NUM_THREADS=$THREADS "$LOCATER" train "${how[@]}" $LENGTH >>"$log" 2>&1 ||
    { echo "$folder: $(tail -n 1 "$log") ($log)" >&2; return 255; }
  echo "$LENGTH" >"$done"
  echo "$2 seed $1: $(grep -E '^validation (perplexity|entropy)' "$log" | tail -2 | tr '\n' ' ')"
}
export -f run
export DATA OUT LENGTH FLAGS EVERY LOCATER THREADS

mkdir -p "$OUT"
# Seeds outermost: wherever it stops, the arms can be compared on the seeds that are done.
LIST=$(for seed in $SEEDS; do
  for arm in $ARMS; do
    awk -v arm="$arm" -v seed="$seed" '$1 == arm { print seed, $0; found = 1 } END { exit !found }' <<<"$TABLE" ||
      { echo "no arm called $arm" >&2; exit 2; }
  done
done)
xargs -P "$JOBS" -L 1 bash -c 'run "$@"' run <<<"$LIST"

"$LOCATER" runs "$OUT"
