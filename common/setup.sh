#!/usr/bin/env bash
# Finds the Python for this project: the active virtual (or Conda) environment, if it satisfies requirements.txt and imports
# `common` from this checkout; else `.venv`, created by `uv` if installed, otherwise by venv and pip. `.venv` is updated after a
# change of requirements.txt or pyproject.toml, and recreated after a change of its Python or path, or an unfinished setup.
#
#     source common/setup.sh      # sets PYTHON, or exits: 1 after a one-line error with the remedy, 130 on Ctrl-C

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then
    # A separate shell keeps traps, locks and variables out of the caller's.
    PYTHON=$(bash "${BASH_SOURCE[0]}") || exit $?
    unset PYTHONHOME # as `activate` does: it would give .venv another Python's library
    # PYTHONPATH precedes installed packages, and may contain another clone's `common`. An empty entry is the current folder.
    PYTHONPATH=${PYTHONPATH:-}
    while [[ $PYTHONPATH == *::* ]]; do PYTHONPATH=${PYTHONPATH//::/:}; done
    PYTHONPATH=${PYTHONPATH#:} PYTHONPATH=${PYTHONPATH%:}
    PYTHONPATH=${PYTHONPATH:+$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P):$PYTHONPATH}
    return 0
fi

say() { printf '%s\n' "$*" >&2; }
die() { say "cannot set up: $*"; exit 1; }
use() { printf '%s\n' "$1/bin/python"; exit 0; }
[[ $OSTYPE == linux* ]] || die "this is $OSTYPE, but the tasks need Linux (prctl, /proc, namespaces);" \
    "run it under WSL2 or in a container, see book/guide/install.md"
CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
venv=$PWD/.venv stamp=$PWD/.venv/setup-stamp log=$PWD/.venv-setup.log
unset PYTHONHOME PYTHONPATH; export LC_ALL=C PIP_NO_INPUT=1 PIP_USER=0 # pip refuses a user's PIP_USER=1 in an environment

# The stamp records the inputs of .venv; during setup, "making" and the path. `-V` costs 3 ms.
basis() { printf '%s\n' made "$PWD" "$("$venv/bin/python" -V 2>&1)"; }
ingredients() { basis && printf '%s\n' "$(<requirements.txt)" "$(<pyproject.toml)"; }
up_to_date() { [[ -f $stamp && -x $venv/bin/python && $(<"$stamp") == "$(ingredients)" ]]; }

shortcoming() { # prints why the environment $1 is unusable, or nothing if it is usable
    [[ -x $1/bin/python ]] || { echo "has no Python"; return; }
    "$1/bin/python" -I common/setup_check.py 2>&1 | tail -n 1 # tail: only the error of a traceback
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -n $active && ! $active -ef $venv ]]; then
    why=$(shortcoming "$active")
    [[ -n $why ]] || use "$active"
    # Conda activates `base` in every terminal, so it is no choice of the user's
    [[ -z ${VIRTUAL_ENV:-} && ${CONDA_DEFAULT_ENV:-} == base ]] || say "the active environment $active $why; using .venv"
fi
up_to_date && use "$venv"

{ exec 9>>"$log"; } 2>/dev/null || die "$PWD is not writable" # its lock ends with this shell and its children
flock -n 9 || [[ $? != 1 ]] || { say "another run is setting up .venv; waiting for it"; flock 9; }
up_to_date && use "$venv"
trap 'say "stopped; the next run sets up again"; exit 130' INT
old=$(cat "$stamp" 2>/dev/null) why=$(shortcoming "$venv") uv=$(type -P uv)

run() { # runs a command, with a progress line on a terminal
    local watcher='' status=0
    [[ ! -t 2 ]] || { bash common/setup_progress.sh "$venv" "$log" "$@" 9>&- & watcher=$!; }
    "$@" >>"$log" 2>&1 </dev/null || status=$?
    [[ -z $watcher ]] || { kill "$watcher" && wait "$watcher"; printf '\r\e[K' >/dev/tty; } 2>/dev/null
    return $status
}

step() { # runs a command that is needed: a failure prints one line
    ! run "$@" || return 0
    # A failed update that changed no file, as without a network, leaves .venv as usable as before
    [[ -z $old || -n $(find "$venv/lib/" -newer "$stamp" -print -quit) ]] || printf '%s\n' "$old" >"$stamp"
    said=$(grep -io 'error: .* .*' "$log" || cat "$log") # in words: not pip's "error: subprocess-exited-with-error"
    die "\`$*\` failed: ${said##*$'\n'} (it needs the network and 4 GB of disk; log: $log)"
}

begin() { # from here on .venv is unfinished
    say "$1"
    { : >"$log" && mkdir -p "$venv" && printf '%s\n' making "$PWD" >"$stamp"; } 2>/dev/null || die "cannot write to $venv"
}

if [[ $old == "$(basis)"$'\n'* ]]; then
    [[ -n $why ]] || { ingredients >"$stamp" && use "$venv"; } # a setting has changed
    begin "updating .venv, which $why"
elif [[ -n $(ls -A "$venv" 2>/dev/null) ]] && # made by the user (an older stamp says "found"), or a link to another clone's
    [[ ! -f $stamp || $old == found* || (-L $venv && $(sed -n 2p "$stamp") != "$PWD") ]]; then
    [[ -n $why ]] || use "$venv"
    die "$venv was not made by this script for this folder, and $why: remove it, or install requirements.txt into it"
else
    for python in python3 python3.13 python3.12 python3.11 python3.10 ''; do # pyenv has a shim for each on PATH, so run it
        "$python" -I -c 'import sys, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' && break
    done 2>/dev/null
    [[ -n $uv$python ]] || die "install uv, or Python 3.10 to 3.13 with venv (on Debian: sudo apt-get install python3-venv)"
    begin "setting up .venv (once; takes a minute or two)"
    find "$venv/" -mindepth 1 ! -name setup-stamp -delete # but not the folder: it may be a link to another disk
    [[ -n $uv ]] || step "$python" -I -m venv "$(realpath "$venv")"
    [[ -z $uv ]] || step uv venv --seed --allow-existing --python '>=3.10,<3.14' "$(realpath "$venv")"
fi
# pip 25 and later can report download progress.
[[ -n $uv ]] || ! run "$venv/bin/python" -I -m pip install -q --retries 0 'pip>=25' || export PIP_PROGRESS_BAR=raw
[[ -n $uv ]] || step "$venv/bin/python" -I -m pip install --disable-pip-version-check -r requirements.txt
[[ -z $uv ]] || step uv pip install --python "$venv/bin/python" -r requirements.txt
why=$(shortcoming "$venv")
[[ -z $why ]] || die "$venv $why after the installation (log: $log)"
ingredients >"$stamp" || die "cannot write $stamp: is the disk full?"
use "$venv"
