#!/usr/bin/env bash
# Everything that is checked, from a bare checkout: installs what is missing, then runs scripts/check.
#
#   scripts/test.sh                         format, lint, types, and the tests that guard every guarantee of docs/guarantees.md
#   scripts/test.sh --all                   the same with every test: also those marked `nightly` (the soak, chains of kills)
#   scripts/test.sh -m gpu                  the tests that need a GPU, without network where .venv is there
#   scripts/test.sh tests/test_repository.py   with other arguments: pytest with these arguments, and nothing else
#
# A test that needs vLLM or a browser fails when that is missing; only where vLLM has no build (macOS) its tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every import of torch takes twice as long

scripts/bootstrap.sh --with-vllm-if-possible --with-tests
if [ "${1:-} ${2:-}" = "-m gpu" ]; then
  export GRPO_REQUIRE="${GRPO_REQUIRE:-gpu,vllm}"
  exec .venv/bin/python -m pytest "$@"
fi
scripts/install-browser
if [ "$(uname -s)" = Darwin ]; then
  echo "test.sh: vLLM has no build for macOS: tests that need it are SKIPPED here; run on Linux for the whole"
  export GRPO_REQUIRE="${GRPO_REQUIRE:-browser}"
else
  export GRPO_REQUIRE="${GRPO_REQUIRE:-vllm,browser}"
fi
if [ $# -eq 0 ] || [ "$*" = --all ]; then
  exec scripts/check "$@"
fi
exec .venv/bin/python -m pytest "$@"
