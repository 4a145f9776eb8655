#!/usr/bin/env bash
# Makes .venv with everything this checkout needs, and changes nothing else. Run it as often as you like: when there is
# nothing to do it says so in a moment. Finds a Python; scripts/install.py decides and does the rest.
#
#   scripts/bootstrap.sh [--with-vllm | --with-vllm-if-possible] [--with-tests] [--with EXTRA[,EXTRA]]
#
# PYTHON=/path/to/python3.12 names the Python to use; GRPO_ASYNC_TORCH=cpu|cuda overrides GPU detection; GRPO_ASYNC_TORCH_INDEX
# names a mirror of PyTorch's CPU index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONDONTWRITEBYTECODE # without .pyc files every import of torch takes twice as long

fits() { # is this a 64-bit Python that the dependencies have builds for?
  "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and sys.maxsize > 2**32))' >/dev/null 2>&1
}

can_make_environments() { # Debian splits venv off into a package of its own
  "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

if [ -z "${PYTHON:-}" ] && fits .venv/bin/python; then
  exec .venv/bin/python -m scripts.install "$@"
fi

candidates=(python3 python3.12 python3.13 python3.11 python)
if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
without_venv=
for candidate in "${candidates[@]}"; do
  fits "$candidate" || continue
  if can_make_environments "$candidate"; then
    exec "$candidate" -m scripts.install "$@"
  fi
  without_venv=${without_venv:-$candidate}
done

if [ -n "$without_venv" ]; then
  version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "bootstrap: $without_venv (Python $version) cannot make virtual environments." >&2
  echo "  Debian, Ubuntu: sudo apt install python$version-venv; then run this again." >&2
elif [ -n "${PYTHON:-}" ]; then
  echo "bootstrap: PYTHON=$PYTHON is not a 64-bit Python 3.11, 3.12 or 3.13." >&2
else
  echo "bootstrap: no 64-bit Python 3.11, 3.12 or 3.13 found (looked for python3, python3.11 to python3.13, python)." >&2
  echo "  Debian, Ubuntu: sudo apt install python3 python3-venv    macOS: brew install python@3.12" >&2
  echo "  Installed elsewhere? PYTHON=/path/to/python3.12 $0" >&2
fi
exit 2
