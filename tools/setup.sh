#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
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

# vLLM's CPU kernels load libnuma; torch.compile calls a C++ compiler and needs
# Python's headers for what it compiles.
system_packages() {
    ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || echo libnuma1
    command -v g++ >/dev/null || echo g++
    "$python" - <<'PY' || echo python3.11-dev
import pathlib, sysconfig
raise SystemExit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())
PY
    "$python" -c 'import ensurepip' 2>/dev/null || echo python3.11-venv
}

missing=$(system_packages | xargs)
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] ||
        fail "install these first: apt-get install $missing"
    say "installing system packages: $missing"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        $missing >/dev/null
fi

# make_venv FOLDER REQUIREMENTS [PROJECT]: install what REQUIREMENTS pins, then
# PROJECT in editable mode, unless the stamp says that this was done.
make_venv() {
    local folder=$1 requirements=$2 project=${3:-} stamp torch start=$SECONDS
    stamp=$(cat "$requirements" ${project:+pyproject.toml} "$0" | sha256sum)
    if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp $PWD" ]; then
        return
    fi
    say "$folder: creating (about two minutes and 4 GB)"
    [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
    rm -f "$folder/.stamp"
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check -q install --no-deps)
    torch=$(grep '^torch==' "$requirements")
    say "$folder: $torch"
    "${pip[@]}" "$torch" 2>/dev/null ||
        # The general index has no CPU builds of torch; PyTorch's own has.
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch"
    say "$folder: $(grep -c == "$requirements") packages"
    "${pip[@]}" -r "$requirements"
    if [ -n "$project" ]; then
        say "$folder: this project, editable"
        "${pip[@]}" --no-build-isolation -e "$project"
    fi
    echo "$stamp $PWD" >"$folder/.stamp"
    say "$folder: ready after $((SECONDS - start)) s"
}

make_venv .venv requirements/cpu.txt .
if [ "${1:-}" = --reference ]; then
    make_venv .venv-reference requirements/reference.txt
fi
