#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments, or says what to install.
# $PYTHON comes first; `find_python.sh oldest` then prefers the oldest supported version.
#
# A name on PATH is no proof: pyenv puts a `python3.13` there that fails unless 3.13 was chosen for
# the folder. So each candidate has to run, and pyenv's own installations are the last resort.
set -u

case "${1:-}" in
    oldest) versions="3.12 3.13 3.14" ;;
    *) versions="3.13 3.12 3.14" ;;
esac

# Prints the interpreter behind a command, or nothing when it does not do. Debian's python3 has no
# ensurepip until python3-venv is installed.
interpreter() {
    "$1" -I -c '
import sys
if sys.version_info >= (3, 12):
    import ensurepip
    print(sys.executable)
' </dev/null 2>/dev/null
}

use() {
    found=$(interpreter "$1") && [ -n "$found" ] || return 1
    printf '%s\n' "$found"
    exit 0
}

if [ -n "${PYTHON:-}" ]; then
    use "$PYTHON"
    echo "find_python: PYTHON=$PYTHON does not run as a Python >= 3.12 with venv; looking further" >&2
fi

for version in $versions; do
    use "python$version"
done
use python3

pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
for version in $versions; do
    for python in "$pyenv/$version"*/bin/python; do
        use "$python"
    done
done
for python in "$pyenv"/3.1[5-9]*/bin/python; do
    use "$python"
done

# echo, not cat: PATH may hold nothing at all.
echo 'find_python: no Python >= 3.12 found. Tried the variable PYTHON, then python3.13,
python3.12, python3.14 and python3 on PATH, then the installations of pyenv. Install one, for example:
    apt install python3 python3-venv    (Debian 13, Ubuntu 24.04 and later)
    dnf install python3.13              (Fedora)
    brew install python@3.13            (macOS)
    pyenv install 3.13
or name one that is elsewhere: make test PYTHON=/path/to/python3.13' >&2
exit 1
