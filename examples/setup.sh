# Sourced by examples/quickstart.sh and tests/run.sh: makes .venv at the repository root once, and puts it first on PATH.
#
# The one idea: a stamp in .venv (hash of pyproject.toml, Python version, place) says what was installed. While it holds, pip does
# not run and nothing touches the network; without it, whatever is in .venv is repaired. A lock makes two set-ups at once safe.
# Python is found by running it, never by its name alone: a pyenv shim can be on PATH and refuse.

_setup_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_setup_venv="$_setup_root/.venv"

# 3.12 first: the prebuilt Transformer Engine extension is for it.
_setup_versions=(3.12 3.13)

# _setup_runs PYTHON VERSION: PYTHON starts, is that version, and can make a virtual environment and reach an index over TLS.
_setup_runs() {
    "$1" -c "import sys, venv, ensurepip, ssl; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

# Prints the first Python that runs.
_setup_find_python() {
    local version candidate
    for version in "${_setup_versions[@]}"; do
        for candidate in "python$version" python3 python \
            "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python "$HOME/.pyenv/versions/$version"*/bin/python; do
            if _setup_runs "$candidate" "$version"; then
                printf '%s\n' "$candidate"
                return 0
            fi
        done
    done
    echo "No Python 3.12 or 3.13 with the modules venv, ensurepip and ssl was found, neither on PATH nor among pyenv's" \
        "versions. Install one (for example: pyenv install 3.12) and run this again." >&2
    return 1
}

# Prints what .venv should have been installed from; fails if its Python does not start.
_setup_expected_stamp() {
    "$_setup_venv/bin/python" - "$_setup_root" <<'PYTHON' 2>/dev/null
import hashlib, pathlib, ssl, sys, venv

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
print(digest, "%d.%d.%d" % sys.version_info[:3], root)
PYTHON
}

_setup_is_current() {
    local expected
    expected="$(_setup_expected_stamp)" && [[ "$expected" == "$(cat "$_setup_venv/.stamp" 2>/dev/null)" ]]
}

# Returns 1 if pip failed (no network, say), 2 if what pip calls complete cannot be imported (an interrupted installation).
_setup_install() {
    local said
    "$_setup_venv/bin/python" -m pip install --disable-pip-version-check -qq --editable "$_setup_root[test]" || return 1
    said="$("$_setup_venv/bin/python" -c "import megatron.core, pydantic, tokenizers, torch, transformers, typer" 2>&1)" || {
        printf '%s\n' "$said" >&2
        return 2
    }
}

_setup_make() {
    local python status=2
    rm -f "$_setup_venv/.stamp"
    echo "Setting up .venv: the first time downloads about 3 GB and takes a few minutes." >&2
    # An environment whose pip starts is completed; only one that is broken is made afresh.
    if "$_setup_venv/bin/python" -m pip --version >/dev/null 2>&1; then
        _setup_install && status=0 || status=$?
    fi
    if ((status == 2)); then
        python="$(_setup_find_python)" || return 1
        "$python" -m venv --clear "$_setup_venv" && _setup_install && status=0 || status=1
    fi
    if ((status)); then
        echo "Setting up .venv failed; the reason is above. Nothing was stamped: run this again to repair it." >&2
        return 1
    fi
    _setup_expected_stamp >"$_setup_venv/.stamp"
}

_setup_main() {
    local python
    if ! _setup_is_current; then
        python="$(_setup_find_python)" || return 1
        # The lock belongs to descriptor 9 and is held until this shell closes it.
        exec 9>"$_setup_root/.venv.lock"
        "$python" -c "import fcntl; fcntl.flock(9, fcntl.LOCK_EX)" || return 1
        _setup_is_current || _setup_make || return 1
        exec 9>&-
    fi
    export VIRTUAL_ENV="$_setup_venv" PATH="$_setup_venv/bin:$PATH"
}

_setup_main || exit 1
