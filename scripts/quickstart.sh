#!/usr/bin/env bash
# Trains a small model from nothing on this computer, CPU or GPU, and shows what it learned.
#
#   scripts/quickstart.sh [--vllm] [--seed N] [ARGUMENTS of `grpo-async train`]
#
#   --vllm     generate with the real vLLM instead of the embedded engine (Linux; installs it on the first call)
#   --seed N   another order of the data and other samples
#   the rest   goes to `grpo-async train`, for example: --set training.max_steps=20
#
# Every call makes a run of its own, runs/quickstart-1, -2, ...; with --resume it goes on with the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE

engine=
name=quickstart
resume=no
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "scripts/quickstart.sh"
      exit 0
      ;;
    --vllm)
      engine=--with-vllm
      name=quickstart-vllm
      ;;
    --seed)
      if [ $# -lt 2 ]; then
        echo "quickstart: --seed needs a number, for example --seed 1" >&2
        exit 2
      fi
      arguments+=(--set "run.seed=$2")
      shift
      ;;
    --seed=*) arguments+=(--set "run.seed=${1#--seed=}") ;;
    *)
      case $1 in --resume | --resume=*) resume=yes ;; esac
      arguments+=("$1")
      ;;
  esac
  shift
done

number=1
while [ -e "runs/$name-$number" ]; do number=$((number + 1)); done
if [ "$resume" = yes ]; then
  number=$((number - 1))
  if [ "$number" -eq 0 ]; then
    echo "quickstart: nothing to resume: there is no run runs/$name-1; leave --resume out" >&2
    exit 2
  fi
fi

scripts/bootstrap.sh ${engine:+"$engine"}
.venv/bin/grpo-async prepare-quickstart
# The name stands first, so that a `--set run.name=...` of the caller wins.
exec .venv/bin/grpo-async train "configs/$name.yaml" --set "run.name=$name-$number" ${arguments[@]+"${arguments[@]}"}
