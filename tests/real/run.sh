#!/bin/bash
# Run the acceptance tests against a real SGLang server on this machine's CPU (`make real`).
#
# The first call makes SGLang's venv (2.8 GB, from the package index) and a tiny hybrid model, outside
# the repository; later calls find them. No network is needed then.
#
#   HEADRACE_SHARED        folder that holds real_sglang/          default: ../shared
#   HEADRACE_REAL_SGLANG   a venv that its setup.sh has made       default: made in HEADRACE_REAL_DIR
#   HEADRACE_REAL_DIR      for the venv and the models             default: ~/.cache/headrace-real
#   HEADRACE_REAL_VERSION  SGLang's version                        default: 0.5.23
#   ARGS                   for pytest                             default: tests/real
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/../.." && pwd)
SHARED=${HEADRACE_SHARED:-$ROOT/../shared}
VERSION=${HEADRACE_REAL_VERSION:-0.5.23}

fail() {
  echo "make real: $1" >&2
  exit 2
}

[ -f "$SHARED/real_sglang/setup.sh" ] ||
  fail "no real_sglang/setup.sh in $SHARED: name the folder that holds real_sglang/ in HEADRACE_SHARED"
RECIPE=$(cd "$SHARED/real_sglang" && pwd)

DIR=$(realpath -m "${HEADRACE_REAL_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/headrace-real}")
case "$DIR/" in
  "$ROOT"/*) fail "HEADRACE_REAL_DIR is inside the repository ($DIR): choose another place" ;;
esac

if [ -n "${HEADRACE_REAL_SGLANG:-}" ]; then
  VENV=$HEADRACE_REAL_SGLANG
  [ -x "$VENV/bin/python" ] || fail "HEADRACE_REAL_SGLANG=$VENV holds no bin/python"
else
  VENV=$DIR/sglang-$VERSION
  # Written last: a set-up that was interrupted is made anew.
  if [ ! -f "$VENV/.ready" ]; then
    echo "make real: installing SGLang $VERSION into $VENV (2.8 GB, some minutes, once)"
    mkdir -p "$DIR"
    rm -rf "$VENV"
    bash "$RECIPE/setup.sh" "$VENV" "$VERSION"
    touch "$VENV/.ready"
  fi
fi

make_model() { # make_model NAME SCRIPT [ARGUMENT]
  [ -f "$DIR/models/$1/.ready" ] && return
  echo "make real: making the $1 model in $DIR/models/$1"
  rm -rf "${DIR:?}/models/$1"
  mkdir -p "$DIR/models/$1"
  HF_HUB_OFFLINE=1 "$VENV/bin/python" "$RECIPE/$2" "$DIR/models/$1" "$3" >/dev/null
  touch "$DIR/models/$1/.ready"
}

# The hybrid model takes the dense one's tokenizer.
make_model dense make_tiny.py qwen3
make_model hybrid make_hybrid.py "$DIR/models/dense"

export HEADRACE_REAL_SGLANG=$VENV
export HEADRACE_REAL_MODEL=$DIR/models/hybrid
export HEADRACE_REAL_RECIPE=$RECIPE
cd "$ROOT"
# In the order of the file: each change of the server's flags costs a start.
# shellcheck disable=SC2086  # ARGS is a list of words
exec .venv/bin/python -m pytest -m real -p no:randomly -s ${ARGS:-tests/real}
