#!/usr/bin/env bash
# The paper's experiment: WikiText-2 at word level, 1 layer, 1 head, post-LN, width 128, with and without LocAteR.
#
#   runs/paper.sh DATA [OUT]      DATA: the folder with train.txt and valid.txt; OUT: where the runs go (runs/paper)
#
# Stop it at any time and start it again: finished runs are skipped, the others continue to the bit.
#   EPOCHS=1 SEEDS="0 1 2" JOBS=2 ARMS="none late-3.5" runs/paper.sh DATA
# One epoch is 1,020 steps of 16 × 128 words, about 20 minutes on one core. On a GPU, the full length:
#   EPOCHS=40 JOBS=1 FLAGS="--device cuda --precision bf16 --batch 64 --learning-rate 2e-3" runs/paper.sh DATA
set -euo pipefail
DATA=${1:?"usage: runs/paper.sh DATA [OUT]"}
OUT=${2:-runs/paper}
EPOCHS=${EPOCHS:-1}
SEEDS=${SEEDS:-"0 1 2"}
JOBS=${JOBS:-2}
FLAGS=${FLAGS:-}
THREADS=${THREADS:-1}
LOCATER=${LOCATER:-locater}

# name, κ, mean of the eigenvalues (free, initial, or tr W in units of λ); the border of late and middle is 2.
TABLE="
none         0       free
free-2.5e-3  2.5e-3  free
initial      2.5e-3  initial
late-1       2.5e-3  1
border-2     2.5e-3  2
middle-3.5   2.5e-3  3.5
middle-7     2.5e-3  7
early-1      2.5e-3  -1
free-2.5e-4  2.5e-4  free
free-1e-3    1e-3    free
free-1e-2    1e-2    free
weak-3.5     2.5e-4  3.5
strong-3.5   1e-2    3.5
mean-3.5     0       3.5
"
ARMS=${ARMS:-$(awk 'NF { print $1 }' <<<"$TABLE")}

run() { # name κ mean seed
  local folder="$OUT/$1-seed$4"
  local result="$folder.json" how
  [ -f "$result" ] && return 0
  if [ -f "$folder/config.json" ]; then
    how=(--resume "$folder")
  else
    rm -rf "$folder"
    # shellcheck disable=SC2206
    how=(--preset paper --data "$DATA" --epochs "$EPOCHS" --seed "$4" --strength "$2" --mean "$3"
      --validate-every 255 --save-every 255 $FLAGS --out "$folder")
  fi
  # A run that was stopped reports too, but not with exit code 0: only a finished one has a result.
  OMP_NUM_THREADS=$THREADS "$LOCATER" train "${how[@]}" --json "$result.part" >>"$folder.log" 2>&1 || return 255
  mv "$result.part" "$result"
  echo "$1 seed $4: $(grep -E '^validation (perplexity|entropy)' "$folder.log" | tail -2 | tr '\n' ' ')"
}
export -f run
export DATA OUT EPOCHS FLAGS LOCATER THREADS

mkdir -p "$OUT"
# Seeds outermost: wherever it stops, the arms can be compared on the seeds that are done.
for seed in $SEEDS; do
  for arm in $ARMS; do
    awk -v arm="$arm" -v seed="$seed" '$1 == arm { print $1, $2, $3, seed; found = 1 } END { exit !found }' <<<"$TABLE" ||
      { echo "no arm called $arm" >&2; exit 2; }
  done
done | xargs -P "$JOBS" -L 1 bash -c 'run "$0" "$1" "$2" "$3"'

# The end of every arm: mean ± standard error over seeds.
"${PYTHON:-python3}" - "$OUT" <<'PYTHON'
import json, pathlib, statistics, sys

rows = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*-seed*.json")):
    rows.setdefault(path.name.rsplit("-seed", 1)[0], []).append(json.loads(path.read_text())["validation"])


def cell(values):
    mean = statistics.fmean(values)
    return f"{mean:.3f}" + (f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else "")


columns = {
    "perplexity": lambda row: row["perplexity"],
    "entropy": lambda row: row["entropy"],
    "tr W/λ": lambda row: row["heads"][0]["trace"] / row["heads"][0]["temperature"],
    "tr W²": lambda row: row["heads"][0]["trace_of_square"],
    "η/λ": lambda row: row["heads"][0]["eta"] / row["heads"][0]["temperature"],
    "ξ": lambda row: row["heads"][0]["xi"],
    "localisation": lambda row: row["heads"][0]["localisation"],
    "residual": lambda row: row["layers"][-1]["residual"],
    "effective rank": lambda row: row["layers"][-1]["effective_rank"],
}
print("| arm | seeds | " + " | ".join(columns) + " |")
print("|" + "---|" * (len(columns) + 2))
for arm, found in sorted(rows.items(), key=lambda pair: statistics.fmean(row["perplexity"] for row in pair[1])):
    print(f"| {arm} | {len(found)} | " + " | ".join(cell([of(row) for row in found]) for of in columns.values()) + " |")
PYTHON
