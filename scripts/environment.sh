# Sourced by the other scripts, in the repository's root: makes the virtual environment where it is
# missing or older than pyproject.toml.

VENV="${VENV:-.venv}"
# PyTorch's threads wait for each other by spinning, which makes a step ten times slower where
# another process wants the same cores; so they spin for a short time only, as under the command.
# How they wait changes no result.
if [[ -z "${OMP_WAIT_POLICY:-}" ]]; then
    export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
fi

# Usage: make_environment [dev]. Afterwards "$VENV/bin/python" runs swaptrain (dev: its tests too).
make_environment() {
    local extra="${1:-}" python="${PYTHON:-}" candidate
    # What is installed is a function of pyproject.toml and of where the repository lies; a stamp of
    # both makes the second start immediate.
    local stamp wanted
    stamp="$VENV/.swaptrain${extra:+-$extra}"
    wanted="$(pwd -P) $(cksum < pyproject.toml)"
    if [[ -x "$VENV/bin/python" && -f "$stamp" && "$(< "$stamp")" == "$wanted" ]]; then
        return
    fi
    # pip is what `python -m venv` puts in last: without it the environment was not finished.
    if [[ ! -x "$VENV/bin/pip" ]]; then
        for candidate in ${python:-python3 python3.14 python3.13 python3.12 python3.11}; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
                python="$candidate"
                break
            fi
            python=""
        done
        if [[ -z "$python" ]]; then
            echo "swaptrain needs Python 3.11 or later; found: $(${PYTHON:-python3} --version 2>&1 || true)." >&2
            echo "Install one, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
            exit 2
        fi
        echo "making $VENV with $("$python" --version)"
        if ! "$python" -m venv "$VENV"; then
            echo "cannot make $VENV: on Debian and Ubuntu install python3-venv first" >&2
            exit 2
        fi
    fi
    echo "installing swaptrain into $VENV (the first time this downloads PyTorch)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
    # What holds the extra holds the program too.
    echo "$wanted" > "$stamp"
    echo "$wanted" > "$VENV/.swaptrain"
}
