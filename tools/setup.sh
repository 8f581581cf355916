#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Set up the environments. Safe to call again: what is up to date is left alone.
#
#   tools/setup.sh              .venv            vLLM for the CPU and this project
#   tools/setup.sh --reference  .venv-reference  the reference implementation, too
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '[setup] %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case "${1:-}" in
    "" | --reference) ;;
    *) fail "unknown option '$1'; the only one is --reference" ;;
esac

python=$(command -v python3.11) ||
    fail "Python 3.11 is needed (Debian 12: apt-get install python3.11 python3.11-venv)"

# What nothing runs without: vLLM's CPU kernels load libnuma.
needed_packages() {
    ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || echo libnuma1
    "$python" -c 'import ensurepip' 2>/dev/null || echo python3.11-venv
}

# What vLLM is faster with: torch.compile calls a C++ compiler and needs Python's
# headers for what it compiles. Without them the model runs uncompiled.
useful_packages() {
    command -v g++ >/dev/null || echo g++
    "$python" - <<'PY' || echo python3.11-dev
import pathlib, sysconfig
raise SystemExit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())
PY
}

apt_install() {
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 1
    say "installing system packages: $*"
    apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends "$@" >/dev/null
}

# show_progress FOLDER TOTAL: pip's output as a count on one line.
show_progress() {
    awk -v folder="$1" -v total="$2" '
        /^Collecting |^Processing / {
            printf "\r[setup] %s: %d of %d packages", folder, ++n, total
            fflush()
        }
        /^Installing / { printf "\n[setup] %s: unpacking them\n", folder; fflush() }
        /^ERROR/ { print }
    ' >&2
}

# make_venv FOLDER REQUIREMENTS [PROJECT...]: install what REQUIREMENTS pins and the
# PROJECTs, the last of them in editable mode, unless the stamp says that it was done.
make_venv() {
    local folder=$1 requirements=$2 stamp torch start=$SECONDS
    shift 2
    stamp=$(cat "$requirements" "${@/%//pyproject.toml}" tools/setup.sh | sha256sum)
    stamp="${stamp%% *} $PWD"
    [ "$(cat "$folder/.stamp" 2>/dev/null)" != "$stamp" ] || return 0
    say "$folder: creating (a few minutes and 3 GB)"
    [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
    rm -f "$folder/.stamp"
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check install --no-deps)
    torch=$(grep '^torch==' "$requirements")
    say "$folder: $torch"
    "${pip[@]}" -q "$torch" 2>/dev/null ||
        # The general index has no CPU builds of torch; PyTorch's own has.
        "${pip[@]}" -q --index-url https://download.pytorch.org/whl/cpu "$torch"
    "${pip[@]}" -r "$requirements" |
        show_progress "$folder" "$(grep -c == "$requirements")"
    while [ $# -gt 1 ]; do
        "${pip[@]}" -q --no-build-isolation "./$1"
        shift
    done
    if [ $# = 1 ]; then
        say "$folder: this project, editable"
        "${pip[@]}" -q --no-build-isolation -e "$1"
    fi
    echo "$stamp" >"$folder/.stamp"
    say "$folder: ready after $((SECONDS - start)) s"
}

if needed=$(needed_packages | xargs) && [ -n "$needed" ]; then
    # shellcheck disable=SC2086  # a list of words
    apt_install $needed || fail "install these first: apt-get install $needed"
fi
if [ ! -e .venv/.stamp ] && useful=$(useful_packages | xargs) && [ -n "$useful" ]; then
    # shellcheck disable=SC2086
    apt_install $useful || say "for speed, install these: apt-get install $useful"
fi

make_venv .venv requirements/cpu.txt tools/vllm_name .
if [ "${1:-}" = --reference ]; then
    make_venv .venv-reference requirements/reference.txt
fi
